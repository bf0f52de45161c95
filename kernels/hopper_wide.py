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
    warpgroup_mma_wait,
)

from tpla.kernels.hopper_accumulate import accumulate
from tpla.kernels.hopper_tiles import (
    LOGITS,
    QUARTERS,
    factor_vote,
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
    f"{{ {factor_vote(2, 3)} selp.b32 $0, 1, 0, any; selp.b32 $1, 1, 0, any; }}"
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
