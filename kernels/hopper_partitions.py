"""What the warps of :func:`tpla.kernels.hopper_decode.decode_kernel` do beside those that bring
tiles and prepare: who converts and consumes. Shape suffixes and the recursion are described there.
"""

from __future__ import annotations

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
    factor_vote,
    range_of,
    requests_of,
    softmax,
    start_logits,
    token_scales,
    weights_as_words,
    words_as_fp8,
)

# 64 tokens of 32 pairs of columns, as ldmatrix brings them when it transposes pairs.
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0], [0, 8]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16]],
        [],
        [64, 32],
    )
)


@gluon.jit
def _clear_unused(bits, token, valid):
    """Zero from token ``valid`` on: unused rows may hold NaN, and 0 NaN is NaN."""
    return gl.where((token < valid)[:, None], bits, 0)


@gluon.jit
def _stage_as_fp16(latent, values_s, valid, LOAD: gl.constexpr, MASKED: gl.constexpr):
    """A tile's latents as FP16, a few tokens at a time for want of registers."""
    K: gl.constexpr = latent.shape[0]
    TOKENS: gl.constexpr = 16
    following = latent.slice(0, TOKENS).load(LOAD)
    for start in gl.static_range(0, K, TOKENS):
        values = following
        if start + TOKENS < K:
            following = latent.slice(start + TOKENS, TOKENS).load(LOAD)
        if MASKED:
            token = start + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LOAD))
            bits = _clear_unused(values.to(gl.int8, bitcast=True), token, valid)
            values = bits.to(gl.float8e4nv, bitcast=True)
        values_s.slice(start, TOKENS).store(values.to(gl.float16))


@gluon.jit
def _separate(pairs):
    """Pairs of columns as single columns with pairs of tokens along the rows.

    Tokens of each 16 (bits t3 t2 t1 t0) end at positions (t2 t1 t3 t0), as P holds them: a thread
    has two neighbours of either eight, whose bytes it regroups by column.
    """
    TOKENS: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    low, high = gl.split(pairs.reshape([TOKENS // 16, 2, 8, PAIRS]).permute([0, 2, 3, 1]))
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r", [low, high], dtype=(gl.int16, gl.int16), is_pure=True, pack=2,
    )  # fmt: skip
    both = gl.join(even, odd).permute([2, 3, 0, 1])
    return both.reshape([2 * PAIRS, TOKENS // 2])


@gluon.jit
def _stage_transposed(latent, values_s, valid, MASKED: gl.constexpr):
    """A tile's pairs of columns as columns of pairs of tokens, some at a time."""
    K: gl.constexpr = latent.shape[0]
    PAIRS: gl.constexpr = latent.shape[1]
    STEP: gl.constexpr = 32
    following = latent.slice(0, STEP, dim=1).load(_PAIRS)
    for start in gl.static_range(0, PAIRS, STEP):
        values = following
        if start + STEP < PAIRS:
            following = latent.slice(start + STEP, STEP, dim=1).load(_PAIRS)
        if MASKED:
            token = gl.arange(0, K, layout=gl.SliceLayout(1, _PAIRS))
            values = _clear_unused(values, token, valid)
        values_s.slice(2 * start, 2 * STEP).store(_separate(values))


@gluon.jit
def _stage_values(latent, values_s, valid, FP8_VALUES: gl.constexpr, MASKED: gl.constexpr):
    """One tile's latents as P V takes them."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    if FP8_VALUES:
        _stage_transposed(latent, values_s, valid, MASKED)
    else:
        _stage_as_fp16(latent, values_s, valid, wide, MASKED)


@gluon.jit
def convert(
    buffers, schedule, STAGES: gl.constexpr, SLOTS: gl.constexpr, SHARE: gl.constexpr,
    FP8_VALUES: gl.constexpr,
):  # fmt: skip
    """Two warps: each tile's latents into a buffer in the form that P V takes them."""
    latent_buf, value_buf, full, empty, value_full, value_empty, merged = buffers
    length_ptr, part_ptr = schedule
    K: gl.constexpr = 64
    part = gl.program_id(1)
    begin, end = requests_of(part_ptr, part)
    number = 0
    for request in range(begin, end):
        length, first, stop, _tiles = range_of(part_ptr, length_ptr, part, request, K)
        for tile in range(first, stop):
            stage = number % STAGES
            slot = number % SLOTS
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            if SHARE == "tiles":
                mbarrier.wait(value_empty.index(slot), ((number // SLOTS) & 1) ^ 1)
            else:
                # Who is done with a tile is done with the values of the one before: the tile after
                # the slot's last one must be gone, whose buffer ``later`` takes next.
                later = number - SLOTS + 1 + STAGES
                mbarrier.wait(empty.index(later % STAGES), ((later // STAGES) & 1) ^ 1)
            latent = latent_buf.index(stage)
            values_s = value_buf.index(slot)
            valid = length - tile * K
            if valid < K:
                _stage_values(latent, values_s, valid, FP8_VALUES, True)
            else:
                _stage_values(latent, values_s, valid, FP8_VALUES, False)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(value_full.index(slot), count=1)
            number += 1
        if SHARE == "tiles":  # consumers exchange results through the value buffers
            mbarrier.wait(merged, (request - begin) & 1)


@gluon.jit
def _rounded(weight, OPERAND: gl.constexpr, FP8_VALUES: gl.constexpr):
    """P' as a consumer keeps it until P V."""
    if FP8_VALUES:
        return weights_as_words(weight)
    else:
        return gl.convert_layout(weight.to(gl.float16), OPERAND)


@gluon.jit
def _as_operand(p, OPERAND: gl.constexpr, FP8_VALUES: gl.constexpr):
    """P' as the left operand of P V, without moving data between threads."""
    if FP8_VALUES:
        return gl.convert_layout(words_as_fp8(p), OPERAND, assert_trivial=True)
    else:
        return p


@gluon.jit
def _merge(
    consumer: gl.constexpr, acc, total, lse, buffers, phase, HALF: gl.constexpr
):  # fmt: skip
    """Join two consumers' results over the same rows: each ends with half of the columns."""
    lse_buf, half_buf, met = buffers
    M: gl.constexpr = acc.shape[0]
    lse_buf.index(consumer).store(lse)
    gl.thread_barrier()
    mbarrier.arrive(met.index(0), count=1)
    mbarrier.wait(met.index(0), phase)
    other = lse_buf.index(1 - consumer).load(gl.SliceLayout(1, LOGITS))
    top = gl.maximum(gl.maximum(lse, other), -1e30)
    own = gl.exp2(lse - top)
    both = own + gl.exp2(other - top)
    lse = gl.where(both > 0.0, top + gl.log2(both), -float("inf"))
    share = gl.where(total > 0.0, own / (both * total), 0.0)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    left, right = gl.split(acc.reshape([M, 2, acc.shape[1] // 2]).permute([0, 2, 1]))
    left = gl.convert_layout(left, HALF, assert_trivial=True)
    right = gl.convert_layout(right, HALF, assert_trivial=True)
    if consumer == 0:
        half_buf.index(0).store(right)
        kept = left
    else:
        half_buf.index(1).store(left)
        kept = right
    gl.thread_barrier()
    mbarrier.arrive(met.index(1), count=1)
    mbarrier.wait(met.index(1), phase)
    out = kept + half_buf.index(1 - consumer).load(HALF)
    gl.thread_barrier()
    mbarrier.arrive(met.index(2), count=1)
    return out, lse


@gluon.constexpr_function
def _sectors(rows, columns):
    """64 rows as they are stored: eight neighbouring columns a thread, 32 a group of four.

    As products leave them, a thread has two, and four threads write half a sector of BF16.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _store(pointers, values, mask):
    """Values rounded to what the pointers point to, in the order of the pointers."""
    rounded = values.to(pointers.dtype.element_ty)
    gl.store(pointers, gl.convert_layout(rounded, pointers.type.layout), mask=mask)


@gluon.jit
def _write(
    out, lse, column, row, m0, slot, whole, results, shape, WRITES_LSE: gl.constexpr,
    PADDED: gl.constexpr, COLUMNS: gl.constexpr, LN2: gl.constexpr,
):  # fmt: skip
    """Results of a request that lies within one part, or partial results of one that does not;
    of what is ``PADDED`` only the row's ``COLUMNS``."""
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr = results
    rows, _heads, _queries, _softmax_scale_log2 = shape
    STORED: gl.constexpr = _sectors(out.shape[0], out.shape[1])
    m = m0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, STORED))
    d = column + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, STORED))
    m_lse = m0 + gl.arange(0, out.shape[0], layout=lse.type.layout)
    mask = (m < rows)[:, None]
    if PADDED:
        mask = mask & (d < COLUMNS)[None, :]
    if whole:
        at = (row + m)[:, None] * COLUMNS + d[None, :]
        _store(out_ptr + at, out, mask)
        if WRITES_LSE:
            gl.store(lse_ptr + row + m_lse, lse * LN2, mask=m_lse < rows)
    else:
        base = slot.to(gl.int64) * rows
        at = (base + m)[:, None] * COLUMNS + d[None, :]
        _store(partial_ptr + at, out, mask)
        if WRITES_LSE:
            gl.store(partial_lse_ptr + base + m_lse, lse, mask=m_lse < rows)


@gluon.jit
def _finish(
    consumer: gl.constexpr, acc, ref, total_4, merge_bufs, phase, row, m0, part, first,
    stop, tiles, results, shape, SHARE: gl.constexpr, COLUMNS: gl.constexpr, LN2: gl.constexpr,
):  # fmt: skip
    """Normalise what a consumer accumulated over a request, join it with the other's, write it."""
    WIDTH: gl.constexpr = acc.shape[1]
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    total = gl.convert_layout(gl.sum(total_4, 1), gl.SliceLayout(1, LOGITS))
    lse = gl.where(total > 0.0, ref + gl.log2(total), -float("inf"))
    slot = 2 * part + gl.where(first == 0, 1, 0)
    whole = (first == 0) & (stop == tiles)
    if SHARE == "tiles":
        out, lse = _merge(consumer, acc, total, lse, merge_bufs, phase, half)
        _write(out, lse, consumer * (WIDTH // 2), row, m0, slot, whole, results, shape,
               consumer == 0, COLUMNS < WIDTH, COLUMNS, LN2)  # fmt: skip
    else:
        share = gl.where(total > 0.0, 1.0 / total, 0.0)
        out = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
        _write(out, lse, 0, row, m0, slot, whole, results, shape, True, COLUMNS < WIDTH, COLUMNS,
               LN2)  # fmt: skip


@gluon.jit
def _rescaled(acc, decay):
    """Sums times a factor of their row; as assembly, which LLVM leaves where it is in a loop."""
    factor = gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        "mul.f32 $0, $1, $2;", "=f,f,f", [acc, factor], dtype=gl.float32, is_pure=True, pack=1
    )


def _rescale(pack: int) -> str:
    """PTX for so many sums of two rows, whose factors are those of sums 0 and 2."""
    keep = " ".join(f"mov.b32 ${i}, ${pack + i};" for i in range(pack))
    scale = " ".join(f"mul.f32 ${i}, ${i}, ${2 * pack + i};" for i in range(pack))
    return f"{{ {factor_vote(2 * pack, 2 * pack + 2)} {keep} @!any bra DONE; {scale} DONE: }}"


_PACK = gl.constexpr(32)
_RESCALE = gl.constexpr(_rescale(_PACK.value))
_RESCALE_OPERANDS = gl.constexpr(",".join(["=&f"] * _PACK.value + ["f"] * (2 * _PACK.value)))


@gluon.jit
def _rescaled_where_needed(acc, decay):
    """Sums times a factor of their row; a warp all of whose factors are 1 skips it."""
    factor = gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_OPERANDS, [acc, factor], dtype=gl.float32, is_pure=True, pack=_PACK
    )


@gluon.jit
def consume(
    consumer: gl.constexpr, buffers, q_scale_ptr, schedule, results, shape,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, SHARE: gl.constexpr, FP8_VALUES: gl.constexpr,
    COLUMNS: gl.constexpr, LN2: gl.constexpr,
):  # fmt: skip
    """Four warps: attend from 64 query rows to the tiles of a part that are this consumer's."""
    query_bufs, tile_bufs, level_bufs, value_bufs, merge_bufs = buffers
    q_buf, q_rope_buf, q_full, q_empty = query_bufs
    latent_buf, rope_buf, scale_buf, full, empty = tile_bufs
    _scale_buf, level_buf, _full, level_full = level_bufs
    value_buf, value_full, value_empty = value_bufs
    length_ptr, part_ptr = schedule
    rows, heads, queries, softmax_scale_log2 = shape
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    STEP: gl.constexpr = 2 if SHARE == "tiles" else 1
    WIDTH: gl.constexpr = value_buf.shape[2]
    # Sums are rescaled beside Q K instead of after the softmax where that was faster (README).
    # It leaves no registers for the RoPE queries, which then stay in shared memory.
    EARLY: gl.constexpr = SHARE == "rows" and not FP8_VALUES
    value_k: gl.constexpr = 32 if FP8_VALUES else 16
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, value_k])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 4 if FP8_VALUES else 2)
    own_block: gl.constexpr = consumer if SHARE == "rows" else 0
    q_s = q_buf.index(own_block)
    q_rope_s = q_rope_buf.index(own_block)
    m0 = (gl.program_id(0) * q_buf.shape[0] + own_block) * M
    m_s = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, LOGITS))

    part = gl.program_id(1)
    begin, end = requests_of(part_ptr, part)
    number = 0  # tiles of this part so far: which buffer, and which phase of its barrier
    for request in range(begin, end):
        length, first, stop, tiles = range_of(part_ptr, length_ptr, part, request, K)
        row = gl.cast(request, gl.int64) * rows
        row_scale = gl.load(q_scale_ptr + row + m_s, mask=m_s < rows, other=1.0)
        row_scale = row_scale * softmax_scale_log2
        last_seen = length - queries + m_s // heads
        all_see = length - queries + 1

        acc = gl.zeros([M, WIDTH], gl.float32, out_layout)
        top = gl.full([M], -1e30, gl.float32, gl.SliceLayout(1, LOGITS))
        ref = top
        total_4 = gl.zeros([M, 4], gl.float32, QUARTERS)
        mbarrier.wait(q_full, (request - begin) & 1)
        # In registers, since shared memory is what the products wait for.
        q_rope = q_rope_s if EARLY else q_rope_s.load(gl.DotOperandLayout(0, LOGITS, 2))
        own = first + (consumer if SHARE == "tiles" else 0)
        if own < stop:
            here = number + own - first
            stage = here % STAGES
            mbarrier.wait(full.index(stage), (here // STAGES) & 1)
            s = start_logits(q_s, q_rope, latent_buf.index(stage), rope_buf.index(stage))
            mbarrier.wait(level_full.index(stage), (here // STAGES) & 1)
            k_scale = token_scales(scale_buf.index(stage), own * K, length)
            level = level_buf.index(stage).load(gl.SliceLayout(1, LOGITS))
            s = warpgroup_mma_wait(0, deps=[s])
            weight, decay, top, ref, total_4 = softmax(
                s, k_scale, level, row_scale, last_seen, own * K, all_see, top, ref, total_4,
                FP8_VALUES,
            )  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            p = _rounded(weight, operand, FP8_VALUES)
            for tile in range(own + STEP, stop, STEP):
                following = number + tile - first
                stage = following % STAGES
                slot = here % SLOTS
                mbarrier.wait(full.index(stage), (following // STAGES) & 1)
                s = start_logits(q_s, q_rope, latent_buf.index(stage), rope_buf.index(stage))
                if EARLY:
                    acc = _rescaled(acc, decay)
                mbarrier.wait(value_full.index(slot), (here // SLOTS) & 1)
                values_s = value_buf.index(slot)
                acc = warpgroup_mma(
                    _as_operand(p, operand, FP8_VALUES), values_s, acc, is_async=True
                )
                mbarrier.wait(level_full.index(stage), (following // STAGES) & 1)
                k_scale = token_scales(scale_buf.index(stage), tile * K, length)
                level = level_buf.index(stage).load(gl.SliceLayout(1, LOGITS))
                s = warpgroup_mma_wait(1, deps=[s])
                weight, decay, top, ref, total_4 = softmax(
                    s, k_scale, level, row_scale, last_seen, tile * K, all_see, top, ref, total_4,
                    FP8_VALUES,
                )  # fmt: skip
                # Written after the softmax, yet ptxas waits before most of it. With the softmax
                # held before the wait, beside P V, the kernel was slower (README).
                acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
                gl.thread_barrier()  # every warp is done with the tile and the values
                mbarrier.arrive(empty.index(stage), count=1)
                if SHARE == "tiles":
                    mbarrier.arrive(value_empty.index(slot), count=1)
                if FP8_VALUES:
                    acc = _rescaled_where_needed(acc, decay)
                elif not EARLY:
                    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, out_layout))[:, None]
                p = _rounded(weight, operand, FP8_VALUES)
                here = following
            slot = here % SLOTS
            if EARLY:
                acc = _rescaled(acc, decay)
            mbarrier.wait(value_full.index(slot), (here // SLOTS) & 1)
            values_s = value_buf.index(slot)
            acc = warpgroup_mma(_as_operand(p, operand, FP8_VALUES), values_s, acc, is_async=False)
            if SHARE == "tiles":
                gl.thread_barrier()
                mbarrier.arrive(value_empty.index(slot), count=1)
        mbarrier.arrive(q_empty, count=1)
        number += stop - first

        _finish(consumer, acc, ref, total_4, merge_bufs, (request - begin) & 1, row, m0, part,
                first, stop, tiles, results, shape, SHARE, COLUMNS, LN2)  # fmt: skip
