"""What the warps of :func:`tpla.kernels.hopper_wide.wide_decode_kernel` do that add up P V.

P V is transposed: columns of the latent by query rows. Values become its left operand in registers,
as ldmatrix brings them, and weights lie in shared memory. Shape suffixes and the recursion are
described at :mod:`tpla.kernels.hopper_decode`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpla.kernels.hopper_tiles import range_of, requests_of


@gluon.constexpr_function
def _pairs_layout(tokens, pairs):
    """Pairs of columns as ldmatrix brings them when it transposes pairs.

    A thread has two neighbouring tokens of either eight of each 16, and every 32nd pair; warps
    divide the pairs.
    """
    registers = [[1, 0], [8, 0]]
    registers += [[1 << bit, 0] for bit in range(4, tokens.bit_length() - 1)]
    registers += [[0, 1 << bit] for bit in range(5, pairs.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8], [0, 16]], [], [tokens, pairs])


@gluon.jit
def _columns_as_fp16(pairs):
    """Pairs of columns as FP16, a row a column."""
    TOKENS: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, $2, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    both = gl.join(even, odd).reshape([TOKENS, PAIRS // 8, 8, 2])
    return both.permute([1, 3, 2, 0]).reshape([2 * PAIRS, TOKENS])


@gluon.jit
def _columns_as_fp8(pairs):
    """Pairs of columns as bytes, a row a column; tokens in the order of
    :func:`words_as_fp8`.

    A thread has two neighbouring tokens of either eight of each 16; it regroups the bytes of four
    such registers, of two times 16 tokens (t4), by column.
    """
    TOKENS: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    # tokens (t5, t4, t3, t2 t1 t0): without t3, a thread's registers follow t0, then t4
    eights = pairs.reshape([TOKENS // 32, 2, 2, 8, PAIRS]).permute([0, 1, 3, 4, 2])
    low, high = gl.split(eights)
    even_0, even_1, odd_0, odd_1 = gl.inline_asm_elementwise(
        """
        prmt.b32 $0, $4, $6, 0x6420;
        prmt.b32 $1, $5, $7, 0x6420;
        prmt.b32 $2, $4, $6, 0x7531;
        prmt.b32 $3, $5, $7, 0x7531;
        """,
        "=r,=r,=r,=r,r,r,r,r", [low, high], dtype=(gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
    # Each result: [t5, t3, (t2 t1, t0), pair]; with t4 and the column of a pair behind.
    both = gl.join(gl.join(even_0, even_1), gl.join(odd_0, odd_1))
    both = both.reshape([TOKENS // 32, 2, 4, 2, PAIRS // 8, 8, 2, 2])
    # (pair of eight, column, pair) x (t5, t4, t2 t1, t3, t0)
    both = both.permute([4, 7, 5, 0, 6, 2, 1, 3]).reshape([2 * PAIRS, TOKENS])
    return both.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _words(latent, TOKENS: gl.constexpr, step: gl.constexpr):
    """What a step reads of a group's columns: two tokens' pairs of columns in a word.

    As words, since of a tensor of bytes that a loop carries each takes a register.
    """
    PAIRS: gl.constexpr = latent.shape[1] // 2
    LOAD: gl.constexpr = _pairs_layout(TOKENS, PAIRS)
    some = latent.slice(step // 2 * TOKENS, TOKENS).slice(step % 2 * PAIRS, PAIRS, dim=1)
    pairs = some.load(LOAD).reshape([TOKENS // 2, 2, PAIRS]).permute([0, 2, 1])
    first, second = gl.split(pairs)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _values(words, OPERAND: gl.constexpr, FP8_VALUES: gl.constexpr):
    """The left operand of a product: a row a column; of 16 columns (bits c3 c2 c1 c0) the rows are
    in the order (c0 c3 c2 c1)."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True,
        pack=1,
    )  # fmt: skip
    pairs = gl.join(first, second).permute([0, 2, 1])
    pairs = pairs.reshape([2 * words.shape[0], words.shape[1]])
    values = _columns_as_fp8(pairs) if FP8_VALUES else _columns_as_fp16(pairs)
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _add_tile(
    left, right, words, latent, following, weight_buf, first_chunk, CHUNKS: gl.constexpr,
    FP8_VALUES: gl.constexpr,
):  # fmt: skip
    """P V of a tile, some tokens and half of the group's columns at a time; what the next step
    begins with is read beside each product. Leaves what the next tile begins with."""
    TOKENS: gl.constexpr = latent.shape[0] // CHUNKS
    operand: gl.constexpr = gl.DotOperandLayout(0, left.type.layout, 4 if FP8_VALUES else 2)
    for step in gl.static_range(2 * CHUNKS):
        weight_s = weight_buf.index(first_chunk + step // 2).permute((1, 0))
        values = _values(words, operand, FP8_VALUES)
        if step % 2 == 0:
            left = warpgroup_mma(values, weight_s, left, is_async=True)
        else:
            right = warpgroup_mma(values, weight_s, right, is_async=True)
        if step + 1 < 2 * CHUNKS:
            words = _words(latent, TOKENS, step + 1)
        else:
            words = _words(following, TOKENS, 0)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return left, right, words


@gluon.jit
def _write(
    acc, share_s, target_ptr, n0: gl.constexpr, rows, column: gl.constexpr, COLUMNS: gl.constexpr
):
    """Normalised sums to memory, 32 query rows at a time for want of registers.

    ``acc`` has a row a column, in the order of :func:`_values`, and a column a query row; what it
    is multiplied by lies in ``share_s``, and ``rows`` count from the program's first. The first
    column is the latent's ``column``, of ``COLUMNS``.
    """
    HELD: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    if N > 32:
        left, right = gl.split(acc.reshape([HELD, 2, N // 2]).permute([0, 2, 1]))
        _write(left, share_s, target_ptr, n0, rows, column, COLUMNS)
        _write(right, share_s, target_ptr, n0 + N // 2, rows, column, COLUMNS)
    else:
        out = acc * share_s.slice(n0, N).load(gl.SliceLayout(0, acc.type.layout))[None, :]
        out = out.reshape([HELD // 16, 2, 8, N]).permute([3, 0, 2, 1]).reshape([N, HELD])
        n = n0 + gl.arange(0, N, layout=gl.SliceLayout(1, out.type.layout))
        d = gl.arange(0, HELD, layout=gl.SliceLayout(0, out.type.layout))
        at = n[:, None] * COLUMNS + d[None, :]
        mask = (n < rows)[:, None]
        if column + HELD > COLUMNS:
            mask = mask & (d < COLUMNS - column)[None, :]
        gl.store(target_ptr + at, out.to(target_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _changed(changed_s):
    """Whether a factor of any row is not 1."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    M: gl.constexpr = changed_s.shape[0]
    WARP_ROWS: gl.constexpr = 16
    changed = changed_s.slice(0, 1).load(one)
    for row in gl.static_range(WARP_ROWS, M, WARP_ROWS):
        changed = changed | changed_s.slice(row, 1).load(one)
    return gl.max(changed, 0) != 0


@gluon.jit
def accumulate(
    group: gl.constexpr, buffers, schedule, results, rows, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, CHUNKS: gl.constexpr, FP8_VALUES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Four warps: half of the latent's columns, as two sums of columns by query rows."""
    latent_buf, full, empty, weight_bufs = buffers
    weight_buf, factor_buf, changed_buf, weight_full, weight_empty = weight_bufs
    length_ptr, part_ptr = schedule
    out_ptr, _lse_ptr, partial_ptr, _partial_lse_ptr = results
    K: gl.constexpr = 64
    N: gl.constexpr = weight_buf.shape[1]
    PAIRS: gl.constexpr = latent_buf.shape[2] // 2
    COLUMN: gl.constexpr = group * 2 * PAIRS
    TOKENS: gl.constexpr = K // CHUNKS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, N, 32 if FP8_VALUES else 16]
    )

    part = gl.program_id(1)
    m0 = gl.program_id(0) * N
    begin, end = requests_of(part_ptr, part)
    number = 0
    for request in range(begin, end):
        length, first, stop, tiles = range_of(part_ptr, length_ptr, part, request, K)
        handed = number + request - begin
        left = gl.zeros([PAIRS, N], gl.float32, layout)
        right = left
        if first < stop:
            stage = number % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            latent = latent_buf.index(stage).slice(group * PAIRS, PAIRS, dim=1)
            words = _words(latent, TOKENS, 0)
            for tile in range(first, stop):
                here = number + tile - first
                stage = here % STAGES
                # After the last tile its own once more, which nobody reads.
                next_tile = gl.where(tile + 1 < stop, here + 1, here)
                ahead = next_tile % STAGES
                turn = handed + tile - first
                slot = turn % SLOTS
                latent = latent_buf.index(stage).slice(group * PAIRS, PAIRS, dim=1)
                following = latent_buf.index(ahead).slice(group * PAIRS, PAIRS, dim=1)
                mbarrier.wait(full.index(ahead), (next_tile // STAGES) & 1)
                mbarrier.wait(weight_full.index(slot), (turn // SLOTS) & 1)
                if (tile + 1) * K > length:  # what lies behind the length was cleared only now
                    words = _words(latent, TOKENS, 0)
                if _changed(changed_buf.index(slot)):
                    decay = factor_buf.index(slot).load(gl.SliceLayout(0, layout))[None, :]
                    left = left * decay
                    right = right * decay
                left, right, words = _add_tile(
                    left, right, words, latent, following, weight_buf, slot * CHUNKS, CHUNKS,
                    FP8_VALUES,
                )  # fmt: skip
                gl.thread_barrier()
                mbarrier.arrive(weight_empty.index(slot), count=1)
                mbarrier.arrive(empty.index(stage), count=1)
        number += stop - first

        turn = handed + stop - first
        slot = turn % SLOTS
        mbarrier.wait(weight_full.index(slot), (turn // SLOTS) & 1)
        share_s = factor_buf.index(slot)
        whole = (first == 0) & (stop == tiles)
        if whole:
            at = (gl.cast(request, gl.int64) * rows + m0) * COLUMNS + COLUMN
            _write(left, share_s, out_ptr + at, 0, rows - m0, COLUMN, COLUMNS)
            _write(right, share_s, out_ptr + at + PAIRS, 0, rows - m0, COLUMN + PAIRS, COLUMNS)
        else:
            part_slot = gl.cast(2 * part + gl.where(first == 0, 1, 0), gl.int64)
            at = (part_slot * rows + m0) * COLUMNS + COLUMN
            _write(left, share_s, partial_ptr + at, 0, rows - m0, COLUMN, COLUMNS)
            _write(right, share_s, partial_ptr + at + PAIRS, 0, rows - m0, COLUMN + PAIRS, COLUMNS)
        gl.thread_barrier()
        mbarrier.arrive(weight_empty.index(slot), count=1)
