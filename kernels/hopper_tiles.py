"""What both Hopper decode kernels do with a tile: who reads it, bulk copies, Q K and softmax.

Shape suffixes and the recursion are described at :mod:`tpla.kernels.hopper_decode`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_FP16_RANGE = gl.constexpr(10.0)
LOG2_FP8_RANGE = gl.constexpr(8.807354922057604)
_REF_FLOOR = gl.constexpr(40.0)
_REF_HEADROOM = gl.constexpr(3.0)
_REF_HOLD = gl.constexpr(10.0)
_SIGMA_FLOOR = gl.constexpr(2.0**-50)
_LOGITS_8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# A column of 64 scales, each token where the logits hold it.
_SCALE_COLUMN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [64, 1],
    )
)
# A row of logits belongs to four threads; each has a column here.
QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 4],
    )
)


@gluon.jit
def range_of(part_ptr, length_ptr, part, request, BLOCK_TOKENS: gl.constexpr):
    """Length, first tile, end tile and whole tiles of a request within a part."""
    begin = gl.load(part_ptr + 2 * part)
    begin_tile = gl.load(part_ptr + 2 * part + 1)
    end = gl.load(part_ptr + 2 * part + 2)
    end_tile = gl.load(part_ptr + 2 * part + 3)
    length = gl.maximum(gl.load(length_ptr + request), 0)
    tiles = (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first = gl.where(request == begin, begin_tile, 0)
    stop = gl.where(request == end, end_tile, tiles)
    return length, first, stop, tiles


@gluon.jit
def requests_of(part_ptr, part):
    """First request of a part, and the one after its last."""
    begin = gl.load(part_ptr + 2 * part)
    end = gl.load(part_ptr + 2 * part + 2)
    end_tile = gl.load(part_ptr + 2 * part + 3)
    return begin, gl.where(end_tile > 0, end + 1, end)


@gluon.jit
def produce(
    buffers, rows_in, schedule, ROPE_COLUMN: gl.constexpr, SCALE_COLUMN: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: ask for tile after tile as buffers come free."""
    latent_buf, rope_buf, scale_buf, full, empty = buffers
    latent_desc, rope_desc, scale_desc, table_ptr, table_stride = rows_in
    length_ptr, part_ptr = schedule
    K: gl.constexpr = 64
    part = gl.program_id(1)
    begin, end = requests_of(part_ptr, part)
    number = 0
    for request in range(begin, end):
        _length, first, stop, _tiles = range_of(part_ptr, length_ptr, part, request, K)
        table = table_ptr + gl.cast(request, gl.int64) * table_stride
        page = gl.load(table + first * K // PAGE, mask=first < stop, other=0)
        for tile in range(first, stop):
            slot = page * PAGE + tile * K % PAGE
            following = gl.minimum(tile + 1, stop - 1)
            page = gl.load(table + following * K // PAGE)
            stage = number % STAGES
            mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes
                            + scale_desc.block_type.nbytes)  # fmt: skip
            tma.async_copy_global_to_shared(latent_desc, [slot, 0], bar, latent_buf.index(stage))
            tma.async_copy_global_to_shared(
                rope_desc, [slot, ROPE_COLUMN], bar, rope_buf.index(stage)
            )
            tma.async_copy_global_to_shared(
                scale_desc, [slot, SCALE_COLUMN], bar, scale_buf.index(stage)
            )
            number += 1


@gluon.jit
def ask_for_queries(buffers, queries_in, request, turn, rows, BLOCKS: gl.constexpr):
    """Ask for the queries of a request, the ``turn``-th of the part."""
    q_buf, q_rope_buf, full, empty = buffers
    q_desc, q_rope_desc = queries_in
    M: gl.constexpr = 64
    mbarrier.wait(empty, (turn & 1) ^ 1)
    mbarrier.expect(full, BLOCKS * (q_desc.block_type.nbytes + q_rope_desc.block_type.nbytes))
    for block in gl.static_range(BLOCKS):
        row = request * rows + (gl.program_id(0) * BLOCKS + block) * M
        tma.async_copy_global_to_shared(q_desc, [row, 0], full, q_buf.index(block))
        tma.async_copy_global_to_shared(q_rope_desc, [row, 0], full, q_rope_buf.index(block))


@gluon.jit
def start_logits(q_s, q_rope, latent, rope):
    """Begin Q K of a tile: two products into one accumulator; ``q_rope`` may be in registers."""
    M: gl.constexpr = q_s.shape[0]
    K: gl.constexpr = latent.shape[0]
    zero = gl.zeros([M, K], gl.float32, _LOGITS_8)
    s = warpgroup_mma(q_s, latent.permute((1, 0)), zero, use_acc=False, is_async=True)
    # With one product outstanding this waits for none: it only gives the accumulator a new layout.
    s = warpgroup_mma_wait(1, deps=[s])
    s = gl.convert_layout(s, LOGITS, assert_trivial=True)
    return warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)


@gluon.jit
def token_scales(scale, first_token, length):
    """Scale of each token, zero beyond the length."""
    K: gl.constexpr = scale.shape[0]
    # Of the 16 bytes a token, the least that a bulk copy brings, the first four are the scale.
    k_scale = scale.slice(0, 1, dim=1).load(_SCALE_COLUMN).reshape([K])
    k_scale = gl.convert_layout(k_scale, gl.SliceLayout(0, LOGITS), assert_trivial=True)
    if first_token + K > length:
        token = first_token + gl.arange(0, K, layout=gl.SliceLayout(0, LOGITS))
        k_scale = gl.where(token < length, k_scale, 0.0)
    return k_scale


@gluon.jit
def scale_level(k_scale, FP8_VALUES: gl.constexpr):
    """log2(sigma / RANGE) of a block's token scales."""
    sigma = gl.maximum(gl.max(k_scale, 0), _SIGMA_FLOOR)
    if FP8_VALUES:
        # The accurate logarithm takes 25 instructions, one after the other.
        return (
            gl.inline_asm_elementwise(
                "lg2.approx.ftz.f32 $0, $1;", "=f,f", [sigma], dtype=gl.float32, is_pure=True,
                pack=1,
            )
            - LOG2_FP8_RANGE
        )  # fmt: skip
    else:
        return ((sigma.to(gl.int32, bitcast=True) >> 23) - 126).to(gl.float32) - LOG2_FP16_RANGE


@gluon.jit
def prepare(
    query_bufs, level_bufs, queries_in, schedule, rows, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, FP8_VALUES: gl.constexpr,
):  # fmt: skip
    """One warp: ask for the queries of request after request, and weigh each tile's scales."""
    scale_buf, level_buf, full, level_full = level_bufs
    length_ptr, part_ptr = schedule
    K: gl.constexpr = 64
    column: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    part = gl.program_id(1)
    begin, end = requests_of(part_ptr, part)
    number = 0
    for request in range(begin, end):
        ask_for_queries(query_bufs, queries_in, request, request - begin, rows, BLOCKS)
        length, first, stop, _tiles = range_of(part_ptr, length_ptr, part, request, K)
        for tile in range(first, stop):
            stage = number % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            k_scale = scale_buf.index(stage).slice(0, 1, dim=1).load(column).reshape([K])
            token = tile * K + gl.arange(0, K, layout=k_scale.type.layout)
            level = scale_level(gl.where(token < length, k_scale, 0.0), FP8_VALUES)
            level_buf.index(stage).store(gl.full([1], level, gl.float32, one))
            mbarrier.arrive(level_full.index(stage), count=1)
            number += 1


def factor_vote(first: int, second: int) -> str:
    """PTX that sets ``any``: whether a factor of a warp's rows is not 1.

    A thread has the factors of two rows, in the operands ``first`` and ``second``.
    """
    return (
        ".reg .pred row, any; "
        f"setp.neu.f32 row, ${first}, 0f3F800000; "
        f"setp.neu.or.f32 row, ${second}, 0f3F800000, row; "
        "vote.sync.any.pred any, row, 0xffffffff;"
    )


@gluon.jit
def softmax(
    s, k_scale, level, row_scale, last_seen, first_token, all_see, top, ref, total,
    HOLDS: gl.constexpr,
):  # fmt: skip
    """One block; returns P', the factor of what was accumulated before, and the new state.

    ``level`` is :func:`scale_level` of ``k_scale``; ``HOLDS`` whether a row's reference stays where
    the block lies within its range, so that the factor is 1.
    """
    logits = s * k_scale[None, :]
    if first_token + s.shape[1] > all_see:
        token = first_token + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LOGITS))
        logits = gl.where(token[None, :] <= last_seen[:, None], logits, -float("inf"))
    # First within a thread, for all rows: the exchanges between threads then overlap.
    own = gl.max(gl.max(logits.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)
    largest = gl.max(gl.convert_layout(own, QUARTERS, assert_trivial=True), 1)
    block = gl.convert_layout(largest, gl.SliceLayout(1, LOGITS)) * row_scale + level
    top = gl.maximum(top, block)
    if HOLDS:
        new_ref = gl.maximum(block + _REF_HEADROOM, top - _REF_FLOOR)
        new_ref = gl.where((block <= ref) & (block >= ref - _REF_HOLD), ref, new_ref)
    else:
        new_ref = gl.maximum(block, top - _REF_FLOOR)
    p = gl.exp2(logits * row_scale[:, None] - new_ref[:, None])
    decay = gl.exp2(ref - new_ref)
    # Summed over a thread's own columns; the four threads of a row meet after the last tile.
    own = gl.sum(gl.sum(p.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)
    own = gl.convert_layout(own, QUARTERS, assert_trivial=True)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, QUARTERS))[:, None] + own
    return p * k_scale[None, :], decay, top, new_ref, total


@gluon.jit
def weights_as_words(weight):
    """P' rounded to FP8, a row's tokens (t3 t0) of each 16 (bits t3 t2 t1 t0) in a word.

    A thread holds these four, two neighbours of either eight. Words, since of a tensor of bytes
    that a loop carries each takes a register.
    """
    M: gl.constexpr = weight.shape[0]
    K: gl.constexpr = weight.shape[1]
    eights = weight.reshape([M, K // 16, 2, 4, 2]).permute([0, 1, 3, 4, 2])
    low, high = gl.split(eights)
    low_0, low_1 = gl.split(low)
    high_0, high_1 = gl.split(high)
    words = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [low_0, low_1, high_0, high_1], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return words.reshape([M, K // 4])


@gluon.jit
def words_as_fp8(words):
    """Bytes of :func:`weights_as_words`, tokens of each 16 at positions (t2 t1 t3 t0).

    So they are an operand of the FP8 product as they lie in registers, and words of shared memory
    as well. Values come in the same order.
    """
    M: gl.constexpr = words.shape[0]
    K: gl.constexpr = 4 * words.shape[1]
    # A thread's registers follow r3 of a row (bits r3 r2 r1 r0), t4, t5. Of four of them each
    # result is the bytes (t3 t0) of one.
    fours = words.reshape([M // 16, 2, 8, K // 32, 2, 4])
    a, b, c, d = gl.inline_asm_elementwise(
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
        "=r,=r,=r,=r,r,r,r,r", [fours], dtype=(gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
    # [rows of 16, t0, row of 8, t5, t3, (t2 t1), r3, t4]
    p = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 6, 2, 3, 7, 5, 4, 1])
    return p.reshape([M, K]).to(gl.float8e4nv, bitcast=True)
