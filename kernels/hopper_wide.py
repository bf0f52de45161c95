"""Decode attention over whole FP8 pages of a wide latent on Hopper, in Gluon.

With more than 256 columns one consumer's registers do not hold what P V adds up for 64 query rows,
and two that divide the columns compute every logit twice (:mod:`tpla.kernels.hopper_decode`). Here
P V is transposed: its rows are columns of the latent, its left operand comes from registers, and
the weights, which all groups of warps read, from shared memory::

    prepare     1 warp    queries of a request             -> one buffer         (bulk copy)
                          log2(sigma / RANGE) of a tile    -> ``STAGES`` words
    rows        1 warp    a tile of 64 cached rows         -> ``STAGES`` buffers (bulk copies)
    weigh       4 warps   softmax of a tile, beside Q K of the next -> ``SLOTS`` buffers
    accumulate  4 warps   half of the columns of P V; twice

So values never return to shared memory: ldmatrix transposes pairs of columns, and each thread
separates them into FP16 (exact) or groups four tokens of a column for the FP8 product.

Sums are rescaled only in tiles that change a row's reference; which these are, the warps that
weigh tell by a word each. The recursion and the shape suffixes are those of
:mod:`tpla.kernels.hopper_decode`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpla.kernels.hopper_tiles import (
    LOGITS,
    QUARTERS,
    prepare,
    produce,
    range_of,
    requests_of,
    softmax,
    start_logits,
    token_scales,
    weights_as_words,
    words_as_fp8,
)


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
def _clear_unused(words_s, valid):
    """Zero a tile's latents from token ``valid`` on: unused rows may hold NaN, and 0 NaN is NaN."""
    STEP: gl.constexpr = 8  # few, for want of registers
    WORDS: gl.constexpr = words_s.shape[1]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    token = gl.arange(0, words_s.shape[0], layout=gl.SliceLayout(1, LOAD))
    for word in gl.static_range(0, WORDS, STEP):
        some_s = words_s.slice(word, STEP, dim=1)
        some_s.store(gl.where((token < valid)[:, None], some_s.load(LOAD), 0))


_ANY_CHANGED = gl.constexpr(
    "{ .reg .pred row, any; setp.neu.f32 row, $2, 0f3F800000; "
    "setp.neu.or.f32 row, $3, 0f3F800000, row; vote.sync.any.pred any, row, 0xffffffff; "
    "selp.b32 $0, 1, 0, any; selp.b32 $1, 1, 0, any; }"
)
"""Of a thread's two factors and the others of its warp."""


@gluon.jit
def _hand_over(
    weight, decay, weight_buf, factor_s, changed_s, first_chunk, FP8_VALUES: gl.constexpr
):  # fmt: skip
    """P' of a tile, and the factor of what was accumulated before, into shared memory."""
    M: gl.constexpr = weight.shape[0]
    K: gl.constexpr = weight.shape[1]
    CHUNKS: gl.constexpr = K // weight_buf.shape[2]
    p = words_as_fp8(weights_as_words(weight)) if FP8_VALUES else weight.to(gl.float16)
    if CHUNKS == 1:
        weight_buf.index(first_chunk).store(p)
    else:
        gl.static_assert(CHUNKS == 2)
        left, right = gl.split(p.reshape([M, 2, K // 2]).permute([0, 2, 1]))
        weight_buf.index(first_chunk).store(left)
        weight_buf.index(first_chunk + 1).store(right)
    factor_s.store(decay)
    changed_s.store(
        gl.inline_asm_elementwise(
            _ANY_CHANGED, "=r,=r,f,f", [decay], dtype=gl.int32, is_pure=True, pack=2
        )
    )


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
def weigh(
    buffers, q_scale_ptr, schedule, results, shape, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    CHUNKS: gl.constexpr, FP8_VALUES: gl.constexpr, LN2: gl.constexpr,
):  # fmt: skip
    """Four warps: weights of 64 query rows; at the end of a request, what divides their sums."""
    query_bufs, tile_bufs, level_bufs, words_buf, weight_bufs = buffers
    q_buf, q_rope_buf, q_full, q_empty = query_bufs
    latent_buf, rope_buf, scale_buf, full, empty = tile_bufs
    _scale_buf, level_buf, _full, level_full = level_bufs
    weight_buf, factor_buf, changed_buf, weight_full, weight_empty = weight_bufs
    length_ptr, part_ptr = schedule
    _out_ptr, lse_ptr, _partial_ptr, partial_lse_ptr = results
    rows, heads, queries, softmax_scale_log2 = shape
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    q_s = q_buf.index(0)
    q_rope_s = q_rope_buf.index(0)
    m_s = gl.program_id(0) * M + gl.arange(0, M, layout=gl.SliceLayout(1, LOGITS))

    part = gl.program_id(1)
    begin, end = requests_of(part_ptr, part)
    number = 0  # tiles of this part so far: which buffer, and which phase of its barrier
    for request in range(begin, end):
        length, first, stop, tiles = range_of(part_ptr, length_ptr, part, request, K)
        row = gl.cast(request, gl.int64) * rows
        handed = number + request - begin  # of every request one thing more than tiles
        row_scale = gl.load(q_scale_ptr + row + m_s, mask=m_s < rows, other=1.0)
        row_scale = row_scale * softmax_scale_log2
        last_seen = length - queries + m_s // heads
        all_see = length - queries + 1
        top = gl.full([M], -1e30, gl.float32, gl.SliceLayout(1, LOGITS))
        ref = top
        total_4 = gl.zeros([M, 4], gl.float32, QUARTERS)
        mbarrier.wait(q_full, (request - begin) & 1)
        if first < stop:
            stage = number % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            s = start_logits(q_s, q_rope_s, latent_buf.index(stage), rope_buf.index(stage))
            s = warpgroup_mma_wait(0, deps=[s])
            for tile in range(first, stop):
                here = number + tile - first
                stage = here % STAGES
                # After the last tile its own logits once more, which nobody reads.
                following = gl.where(tile + 1 < stop, here + 1, here)
                ahead = following % STAGES
                k_scale = token_scales(scale_buf.index(stage), tile * K, length)
                if (tile + 1) * K > length:
                    _clear_unused(words_buf.index(stage), length - tile * K)
                mbarrier.wait(full.index(ahead), (following // STAGES) & 1)
                next_s = start_logits(q_s, q_rope_s, latent_buf.index(ahead), rope_buf.index(ahead))
                mbarrier.wait(level_full.index(stage), (here // STAGES) & 1)
                level = level_buf.index(stage).load(gl.SliceLayout(1, LOGITS))
                weight, decay, top, ref, total_4 = softmax(
                    s, k_scale, level, row_scale, last_seen, tile * K, all_see, top,
                    ref, total_4, True,
                )  # fmt: skip
                turn = handed + tile - first
                slot = turn % SLOTS
                mbarrier.wait(weight_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
                _hand_over(
                    weight, decay, weight_buf, factor_buf.index(slot), changed_buf.index(slot),
                    slot * CHUNKS, FP8_VALUES,
                )  # fmt: skip
                fence_async_shared()
                s = warpgroup_mma_wait(0, deps=[next_s])
                gl.thread_barrier()
                mbarrier.arrive(weight_full.index(slot), count=1)
                mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(q_empty, count=1)
        number += stop - first

        turn = handed + stop - first
        slot = turn % SLOTS
        mbarrier.wait(weight_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        total = gl.convert_layout(gl.sum(total_4, 1), gl.SliceLayout(1, LOGITS))
        factor_buf.index(slot).store(gl.where(total > 0.0, 1.0 / total, 0.0))
        gl.thread_barrier()
        mbarrier.arrive(weight_full.index(slot), count=1)
        lse = gl.where(total > 0.0, ref + gl.log2(total), -float("inf"))
        if (first == 0) & (stop == tiles):
            gl.store(lse_ptr + row + m_s, lse * LN2, mask=m_s < rows)
        else:
            part_slot = gl.cast(2 * part + gl.where(first == 0, 1, 0), gl.int64)
            gl.store(partial_lse_ptr + part_slot * rows + m_s, lse, mask=m_s < rows)


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


@gluon.jit
def wide_decode_kernel(
    q_desc, q_rope_desc, q_scale_ptr, latent_desc, rope_desc, scale_desc, table_ptr, table_stride,
    length_ptr, part_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, rows, heads,
    queries, softmax_scale_log2, WIDTH: gl.constexpr, ROPE: gl.constexpr,
    ROPE_COLUMN: gl.constexpr, SCALE_COLUMN: gl.constexpr, COLUMNS: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, FP8_VALUES: gl.constexpr,
    LN2: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Allocate the buffers and barriers of one part and start its five groups of warps.

    ``COLUMNS`` of a tile's ``WIDTH`` are the row's latent; bulk copies bring zeros for the others.
    """
    # The programs that combine splits may be launched as soon as these all run.
    tl.extra.cuda.gdc_launch_dependents()
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    gl.static_assert(num_warps == 4)
    weight_dtype: gl.constexpr = gl.float8e4nv if FP8_VALUES else gl.float16
    bits: gl.constexpr = 8 if FP8_VALUES else 16
    CHUNKS: gl.constexpr = bits // 8
    weight_layout: gl.constexpr = gl.NVMMASharedLayout(64, bits, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [1, M, WIDTH], q_desc.layout)
    q_rope_buf = gl.allocate_shared_memory(gl.bfloat16, [1, M, ROPE], q_rope_desc.layout)
    latent_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, K, WIDTH], latent_desc.layout)
    rope_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K, ROPE], rope_desc.layout)
    scale_buf = gl.allocate_shared_memory(gl.float32, [STAGES, K, 4], scale_desc.layout)
    weight_buf = gl.allocate_shared_memory(
        weight_dtype, [SLOTS * CHUNKS, M, K // CHUNKS], weight_layout
    )
    factor_buf = gl.allocate_shared_memory(
        gl.float32, [SLOTS, M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    changed_buf = gl.allocate_shared_memory(
        gl.int32, [SLOTS, M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    level_buf = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    level_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    weight_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    weight_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
        mbarrier.init(level_full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(weight_full.index(i), count=1)
        mbarrier.init(weight_empty.index(i), count=2)
    fence_async_shared()
    query_bufs = (q_buf, q_rope_buf, q_full, q_empty)
    tile_bufs = (latent_buf, rope_buf, scale_buf, full, empty)
    weight_bufs = (weight_buf, factor_buf, changed_buf, weight_full, weight_empty)
    level_bufs = (scale_buf, level_buf, full, level_full)
    pairs_buf = latent_buf._reinterpret(
        gl.int16, [STAGES, K, WIDTH // 2], gl.NVMMASharedLayout(128, 16, 2)
    )
    words_buf = latent_buf._reinterpret(
        gl.int32, [STAGES, K, WIDTH // 4], gl.NVMMASharedLayout(128, 32, 2)
    )
    weigh_bufs = (query_bufs, tile_bufs, level_bufs, words_buf, weight_bufs)
    value_bufs = (pairs_buf, full, empty, weight_bufs)
    schedule = (length_ptr, part_ptr)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr)
    shape = (rows, heads, queries, softmax_scale_log2)
    rows_in = (latent_desc, rope_desc, scale_desc, table_ptr, table_stride)
    # Constants stay constant only in a tuple that is written at the call.
    gl.warp_specialize(
        [
            (accumulate, (0, value_bufs, schedule, results, rows, STAGES, SLOTS, CHUNKS,
                          FP8_VALUES, COLUMNS)),
            (accumulate, (1, value_bufs, schedule, results, rows, STAGES, SLOTS, CHUNKS,
                          FP8_VALUES, COLUMNS)),
            (weigh, (weigh_bufs, q_scale_ptr, schedule, results, shape, STAGES, SLOTS, CHUNKS,
                     FP8_VALUES, LN2)),
            (produce, (tile_bufs, rows_in, schedule, ROPE_COLUMN, SCALE_COLUMN, PAGE, STAGES)),
            (prepare, (query_bufs, level_bufs, (q_desc, q_rope_desc), schedule, rows, 1, STAGES,
                       FP8_VALUES)),
        ],
        [4, 4, 1, 1],
        [176, 128, 32, 32],
    )  # fmt: skip
