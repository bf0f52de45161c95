"""Decode attention over whole FP8 pages on Hopper, in Gluon: :mod:`tpla.kernels.latent_decode`.

Why beside the Triton kernel: Triton neither overlaps the upcast (or transposition) of a tile of
values with its matrix products nor keeps logits and values of two tiles in flight. Here a program
works on two tiles at once::

    tensor cores   Q K(t+1)        | P V(t)            + Q^PE K^PE(t+1) | ...
    other units        softmax(t)      values of t+1 -> shared memory

Tiles arrive by bulk copies into ``STAGES`` buffers; one is asked for as soon as its predecessor in
the buffer has been read. Values are staged as FP16 (exact), or as FP8 with tokens along the rows,
which the FP8 product needs: Hopper cannot transpose bytes, so ldmatrix, byte permutations and
16-byte stores do it (SnapMLA, FlashAttention-3). Within 16 tokens they are staged in the order in
which the registers of the logits hold them, so P enters its product as it lies.

Each block of tokens is weighted relative to its own largest logit and token scale, not to the
running ones (SnapMLA, dynamic P quantisation per block)::

    r      = max(largest logit of the block, largest so far - 40)        base 2
    sigma  = max(largest s_k of the block, largest so far * 2^-32)
    P'     = RANGE exp2(logit - r) s_k / sigma, rounded to FP16 or FP8
    acc    = acc exp2(r_old - r) sigma_old / sigma + P' v8

The two floors keep ``acc`` below 2^108 when a block is negligible beside those before it.

Shape suffixes: M query rows (Q H), K tokens of a tile, L latent elements, D RoPE dims.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpla.kernels.decode_call import DecodeCall

_LN2 = 0.6931471805599453
_BLOCK_TOKENS = 64
_WIDTHS = (64, 128, 256)
_LOGIT_FLOOR = gl.constexpr(40.0)
_SIGMA_FLOOR = gl.constexpr(2.0**-32)
_FP16_RANGE = gl.constexpr(1024.0)
_FP8_RANGE = gl.constexpr(448.0)


@gluon.jit
def _in_register_order(values, TOKENS: gl.constexpr, WIDTH: gl.constexpr):
    """Tokens of each 16 (bits t3 t2 t1 t0) at positions (t2 t1 t3 t0), along the first axis."""
    v = values.reshape([TOKENS // 16, 2, 4, 2, WIDTH])
    return v.permute([0, 2, 1, 3, 4]).reshape([TOKENS, WIDTH])


@gluon.jit
def _load_values(latent, valid, LOAD: gl.constexpr, FP8_VALUES: gl.constexpr):
    """A tile's latents in registers, zero from token ``valid`` on."""
    k = latent.load(LOAD)
    if valid < k.shape[0]:  # unused rows may hold NaN, which a weight of zero does not silence
        bits = k.to(gl.int8, bitcast=True)
        token = gl.arange(0, k.shape[0], layout=gl.SliceLayout(1, LOAD))
        bits = gl.where((token < valid)[:, None], bits, 0)
        k = bits.to(gl.float8e4nv, bitcast=True)
    if FP8_VALUES:
        return _in_register_order(k, k.shape[0], k.shape[1])
    else:
        return k.to(gl.float16)


@gluon.jit
def _softmax(
    s, scale, row_scale, last_seen, first_token, length, all_see, top, ref, total, sigma, sigma_top,
    RANGE: gl.constexpr, LOGITS: gl.constexpr, SCALES: gl.constexpr, QUARTERS: gl.constexpr,
):  # fmt: skip
    """One block; returns P', the factor of what was accumulated before, and the new state."""
    # Of the 16 bytes a token, the least that a bulk copy brings, the first four are the scale.
    left, _right = gl.split(scale.load(SCALES).reshape([s.shape[1], 2, 2]))
    k_scale, _third = gl.split(left)
    k_scale = gl.convert_layout(k_scale, gl.SliceLayout(0, LOGITS), assert_trivial=True)
    token = first_token + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LOGITS))
    if first_token + s.shape[1] > length:
        k_scale = gl.where(token < length, k_scale, 0.0)
    logits = s * k_scale[None, :]
    if first_token + s.shape[1] > all_see:
        logits = gl.where(token[None, :] <= last_seen[:, None], logits, -float("inf"))
    block_top = gl.max(logits, 1) * row_scale
    top = gl.maximum(top, block_top)
    new_ref = gl.maximum(block_top, top - _LOGIT_FLOOR)
    block_sigma = gl.max(k_scale, 0)
    sigma_top = gl.maximum(sigma_top, block_sigma)
    new_sigma = gl.maximum(block_sigma, sigma_top * _SIGMA_FLOOR)
    p = gl.exp2(logits * row_scale[:, None] - new_ref[:, None])
    decay = gl.exp2(ref - new_ref)
    # Summed over a thread's own columns; the four threads of a row meet after the last tile.
    own = gl.sum(gl.sum(p.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)
    own = gl.convert_layout(own, QUARTERS, assert_trivial=True)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, QUARTERS))[:, None] + own
    weight = p * (k_scale * (RANGE / new_sigma))[None, :]
    return weight, decay * (sigma / new_sigma), top, new_ref, total, new_sigma, sigma_top


@gluon.jit
def _as_operand(weight, OPERAND: gl.constexpr, FP8_VALUES: gl.constexpr):
    """P' as the left operand of P V, without moving data between threads."""
    if FP8_VALUES:
        p = weight.to(gl.float8e4nv)
        p = p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2])
        p = p.permute([0, 1, 3, 2, 4]).reshape(weight.shape)
        return gl.convert_layout(p, OPERAND, assert_trivial=True)
    else:
        return gl.convert_layout(weight.to(gl.float16), OPERAND)


@gluon.jit
def _range_of(part_ptr, length_ptr, part, request, BLOCK_TOKENS: gl.constexpr):
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
def _requests_of(part_ptr, part, parts):
    """First request of a part, and the one after its last; none beyond the last part."""
    exists = part < parts
    begin = gl.load(part_ptr + 2 * part, mask=exists, other=0)
    end = gl.load(part_ptr + 2 * part + 2, mask=exists, other=0)
    end_tile = gl.load(part_ptr + 2 * part + 3, mask=exists, other=0)
    return begin, gl.where(end_tile > 0, end + 1, end)


@gluon.jit
def _produce(
    ring: gl.constexpr, buffers, rows_in, schedule, ROPE_COLUMN: gl.constexpr,
    SCALE_COLUMN: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, RINGS: gl.constexpr,
):  # fmt: skip
    """One warp: ask for tile after tile as the buffers of its ring come free."""
    _q, _q_rope, latent_buf, rope_buf, scale_buf, _values, full, empty = buffers
    latent_desc, rope_desc, scale_desc, table_ptr, table_stride = rows_in
    length_ptr, part_ptr, parts = schedule
    K: gl.constexpr = 64
    part = gl.program_id(1) * RINGS + ring
    begin, end = _requests_of(part_ptr, part, parts)
    number = 0
    for request in range(begin, end):
        _length, first, stop, _tiles = _range_of(part_ptr, length_ptr, part, request, K)
        table = table_ptr + gl.cast(request, gl.int64) * table_stride
        page = gl.load(table + first * K // PAGE, mask=first < stop, other=0)
        for tile in range(first, stop):
            slot = page * PAGE + tile * K % PAGE
            following = gl.minimum(tile + 1, stop - 1)
            page = gl.load(table + following * K // PAGE)
            stage = ring * STAGES + number % STAGES
            mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            scale_at = scale_buf.index(2 * ring * STAGES + number % (2 * STAGES))
            mbarrier.expect(bar, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes
                            + scale_desc.block_type.nbytes)  # fmt: skip
            tma.async_copy_global_to_shared(latent_desc, [slot, 0], bar, latent_buf.index(stage))
            tma.async_copy_global_to_shared(
                rope_desc, [slot, ROPE_COLUMN], bar, rope_buf.index(stage)
            )
            tma.async_copy_global_to_shared(scale_desc, [slot, SCALE_COLUMN], bar, scale_at)
            number += 1


@gluon.jit
def _consume(
    consumer: gl.constexpr, buffers, queries_in, schedule, results, shape,
    WIDTH: gl.constexpr, ROPE: gl.constexpr, STAGES: gl.constexpr, RINGS: gl.constexpr,
    FP8_VALUES: gl.constexpr, LN2: gl.constexpr,
):  # fmt: skip
    """Four warps: attend from 64 query rows to every tile of a part."""
    q_buf, q_rope_buf, latent_buf, rope_buf, scale_buf, value_buf, full, empty = buffers
    q_ptr, q_rope_ptr, q_scale_ptr = queries_in
    length_ptr, part_ptr, parts = schedule
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr = results
    rows, heads, queries, softmax_scale_log2 = shape
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    RANGE: gl.constexpr = _FP8_RANGE if FP8_VALUES else _FP16_RANGE
    logits_8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 32])
    logits_16: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    value_k: gl.constexpr = 32 if FP8_VALUES else 16
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, value_k])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 4 if FP8_VALUES else 2)
    scales: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [K, 4],
    )
    quarters: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [M, 4],
    )
    load: gl.constexpr = (
        gl.BlockedLayout([16, 4], [4, 8], [1, 4], [1, 0])
        if FP8_VALUES
        else gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    )
    query_load: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [4, 1], [1, 0])
    rope_load: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    q_s = q_buf.index(consumer)
    q_rope_s = q_rope_buf.index(consumer)
    values_s = value_buf.index(consumer)
    ring: gl.constexpr = consumer if RINGS == 2 else 0
    part = gl.program_id(1) * RINGS + ring
    m0 = gl.program_id(0) * M if RINGS == 2 else (gl.program_id(0) * 2 + consumer) * M
    m_q = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, query_load))
    d_q = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, query_load))
    m_r = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, rope_load))
    d_r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_load))
    m_s = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, logits_16))
    m_o = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, out_layout))
    d_o = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, out_layout))

    begin, end = _requests_of(part_ptr, part, parts)
    number = 0  # tiles of this part so far: which buffer, and which phase of its barrier
    for request in range(begin, end):
        length, first, stop, tiles = _range_of(part_ptr, length_ptr, part, request, K)
        row = gl.cast(request, gl.int64) * rows
        q = gl.load(
            q_ptr + (row + m_q)[:, None] * WIDTH + d_q[None, :],
            mask=(m_q < rows)[:, None],
            other=0.0,
        )
        q_rope = gl.load(
            q_rope_ptr + (row + m_r)[:, None] * ROPE + d_r[None, :],
            mask=(m_r < rows)[:, None],
            other=0.0,
        )
        row_scale = gl.load(q_scale_ptr + row + m_s, mask=m_s < rows, other=1.0)
        row_scale = row_scale * softmax_scale_log2
        q_s.store(q)
        q_rope_s.store(q_rope)
        fence_async_shared()
        gl.thread_barrier()
        last_seen = length - queries + m_s // heads
        all_see = length - queries + 1

        acc = gl.zeros([M, WIDTH], gl.float32, out_layout)
        top = gl.full([M], -1e30, gl.float32, gl.SliceLayout(1, logits_16))
        ref = top
        total_4 = gl.zeros([M, 4], gl.float32, quarters)
        sigma = 1e-30
        sigma_top = 1e-30
        if first < stop:
            stage = ring * STAGES + number % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            zero_s = gl.zeros([M, K], gl.float32, logits_8)
            latent = latent_buf.index(stage)
            s = warpgroup_mma(q_s, latent.permute((1, 0)), zero_s, use_acc=False, is_async=False)
            s = warpgroup_mma(
                q_rope_s,
                rope_buf.index(stage).permute((1, 0)),
                gl.convert_layout(s, logits_16),
                is_async=False,
            )
            values = _load_values(latent, length - first * K, load, FP8_VALUES)
            values_s.store(values)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            for tile in range(first, stop - 1):
                here = number + tile - first
                following = here + 1
                stage = ring * STAGES + following % STAGES
                mbarrier.wait(full.index(stage), (following // STAGES) & 1)
                latent = latent_buf.index(stage)
                next_s = warpgroup_mma(
                    q_s, latent.permute((1, 0)), zero_s, use_acc=False, is_async=True
                )
                weight, decay, top, ref, total_4, sigma, sigma_top = _softmax(
                    s, scale_buf.index(2 * ring * STAGES + here % (2 * STAGES)), row_scale,
                    last_seen, tile * K, length, all_see, top, ref, total_4, sigma, sigma_top,
                    RANGE, logits_16, scales, quarters,
                )  # fmt: skip
                p = _as_operand(weight, operand, FP8_VALUES)
                decay = gl.convert_layout(decay, gl.SliceLayout(1, out_layout))
                acc = acc * decay[:, None]
                acc = warpgroup_mma(p, values_s, acc, is_async=True)
                values = _load_values(latent, length - (tile + 1) * K, load, FP8_VALUES)
                next_s = warpgroup_mma_wait(1, deps=[next_s])
                next_s = warpgroup_mma(
                    q_rope_s,
                    rope_buf.index(stage).permute((1, 0)),
                    gl.convert_layout(next_s, logits_16),
                    is_async=True,
                )
                acc, s = warpgroup_mma_wait(0, deps=[acc, next_s])
                gl.thread_barrier()  # every warp has read the values that are replaced
                values_s.store(values)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
            last = stop - 1
            weight, decay, top, ref, total_4, sigma, sigma_top = _softmax(
                s, scale_buf.index(2 * ring * STAGES + (number + last - first) % (2 * STAGES)),
                row_scale, last_seen, last * K, length, all_see, top, ref, total_4, sigma,
                sigma_top, RANGE, logits_16, scales, quarters,
            )  # fmt: skip
            p = _as_operand(weight, operand, FP8_VALUES)
            decay = gl.convert_layout(decay, gl.SliceLayout(1, out_layout))
            acc = acc * decay[:, None]
            acc = warpgroup_mma(p, values_s, acc, is_async=False)
            number += stop - first

        total = gl.convert_layout(gl.sum(total_4, 1), gl.SliceLayout(1, logits_16))
        share = gl.where(total > 0.0, sigma / (RANGE * total), 0.0)
        out = acc * gl.convert_layout(share, gl.SliceLayout(1, out_layout))[:, None]
        lse = gl.where(total > 0.0, ref + gl.log2(total), -float("inf"))
        out_ok = (m_o < rows)[:, None] & (d_o < WIDTH)[None, :]
        if (first == 0) & (stop == tiles):
            at = (row + m_o)[:, None] * WIDTH + d_o[None, :]
            gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=out_ok)
            gl.store(lse_ptr + row + m_s, lse * LN2, mask=m_s < rows)
        else:
            base = (2 * part + gl.where(first == 0, 1, 0)).to(gl.int64) * rows
            at = (base + m_o)[:, None] * WIDTH + d_o[None, :]
            gl.store(partial_ptr + at, out, mask=out_ok)
            gl.store(partial_lse_ptr + base + m_s, lse, mask=m_s < rows)
        gl.thread_barrier()  # every warp is done with the queries


@gluon.jit
def decode_kernel(
    q_ptr, q_rope_ptr, q_scale_ptr, latent_desc, rope_desc, scale_desc, table_ptr, table_stride,
    length_ptr, part_ptr, parts, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, rows, heads,
    queries, softmax_scale_log2, WIDTH: gl.constexpr, ROPE: gl.constexpr,
    ROPE_COLUMN: gl.constexpr, SCALE_COLUMN: gl.constexpr, PAGE: gl.constexpr,
    RINGS: gl.constexpr, STAGES: gl.constexpr, FP8_VALUES: gl.constexpr, LN2: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Two consumers: of 64 rows each over one part (one ring of buffers), or of the same rows over
    a part each (two rings)."""
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    gl.static_assert(num_warps == 4)
    query_layout: gl.constexpr = gl.NVMMASharedLayout(128 if WIDTH > 64 else 64, 8, 2)
    value_dtype: gl.constexpr = gl.float8e4nv if FP8_VALUES else gl.float16
    value_layout: gl.constexpr = (
        gl.NVMMASharedLayout(64, 8, 2, transposed=True)
        if FP8_VALUES
        else gl.NVMMASharedLayout(128, 16, 2)
    )
    TILES: gl.constexpr = RINGS * STAGES
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [2, M, WIDTH], query_layout)
    q_rope_buf = gl.allocate_shared_memory(
        gl.bfloat16, [2, M, ROPE], gl.NVMMASharedLayout(ROPE * 2, 16, 2)
    )
    latent_buf = gl.allocate_shared_memory(gl.float8e4nv, [TILES, K, WIDTH], latent_desc.layout)
    rope_buf = gl.allocate_shared_memory(gl.bfloat16, [TILES, K, ROPE], rope_desc.layout)
    # Scales are read later than the rest of their tile, so they have twice as many buffers.
    scale_buf = gl.allocate_shared_memory(gl.float32, [2 * TILES, K, 4], scale_desc.layout)
    value_buf = gl.allocate_shared_memory(value_dtype, [2, K, WIDTH], value_layout)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 // RINGS)
    fence_async_shared()
    buffers = (q_buf, q_rope_buf, latent_buf, rope_buf, scale_buf, value_buf, full, empty)
    queries_in = (q_ptr, q_rope_ptr, q_scale_ptr)
    schedule = (length_ptr, part_ptr, parts)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr)
    shape = (rows, heads, queries, softmax_scale_log2)
    rows_in = (latent_desc, rope_desc, scale_desc, table_ptr, table_stride)
    # Constants stay constant only in a tuple that is written at the call, hence the repetition.
    if RINGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, buffers, queries_in, schedule, results, shape, WIDTH, ROPE, STAGES,
                            RINGS, FP8_VALUES, LN2)),
                (_consume, (1, buffers, queries_in, schedule, results, shape, WIDTH, ROPE, STAGES,
                            RINGS, FP8_VALUES, LN2)),
                (_produce, (0, buffers, rows_in, schedule, ROPE_COLUMN, SCALE_COLUMN, PAGE, STAGES,
                            RINGS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, buffers, queries_in, schedule, results, shape, WIDTH, ROPE, STAGES,
                            RINGS, FP8_VALUES, LN2)),
                (_consume, (1, buffers, queries_in, schedule, results, shape, WIDTH, ROPE, STAGES,
                            RINGS, FP8_VALUES, LN2)),
                (_produce, (0, buffers, rows_in, schedule, ROPE_COLUMN, SCALE_COLUMN, PAGE, STAGES,
                            RINGS)),
                (_produce, (1, buffers, rows_in, schedule, ROPE_COLUMN, SCALE_COLUMN, PAGE, STAGES,
                            RINGS)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip


def reads_on_hopper(call: DecodeCall) -> bool:
    """Whether :func:`hopper_decode` can serve the call as its workspace asks for it."""
    tiling, layout = call.workspace.tiling, call.layout
    return (
        tiling.hopper
        and tiling.block_tokens == _BLOCK_TOKENS
        and tiling.block_rows in (64, 128)
        and layout.has_scale
        and call.q_scale_BQH is not None
        and layout.latent_width in _WIDTHS
        and layout.qk_rope_head_dim in (32, 64)
        and layout.rope_offset % 16 == 0
        and call.allows_bulk_copies
        and call.rows_SB.is_cuda
        and torch.cuda.get_device_capability(call.rows_SB.device) == (9, 0)
    )


def hopper_decode(call: DecodeCall) -> None:
    """Write outputs of unsplit requests, and partial results of the others."""
    layout, workspace, tiling = call.layout, call.workspace, call.workspace.tiling
    _, queries, heads, width = call.q_latent_BQHL.shape
    rope = layout.qk_rope_head_dim
    latent_rows = call.rows_SB.view(torch.float8_e4m3fn)
    rope_rows = call.rows_SB.view(torch.bfloat16)
    scale_rows = call.rows_SB.view(torch.float32)
    rope_end = (layout.rope_offset + layout.rope_bytes) // 2
    rings = 2 if tiling.block_rows == 64 else 1
    decode_kernel[(workspace.row_blocks, -(-workspace.parts // rings))](
        call.q_latent_BQHL,
        call.q_rope_BQHD,
        call.q_scale_BQH,
        _descriptor(latent_rows, width, width, min(width, 128), 8),
        _descriptor(rope_rows, rope_end, rope, 2 * rope, 16),
        _descriptor(scale_rows, scale_rows.shape[1], 4, 0, 32),
        call.table_BN,
        call.table_BN.stride(0),
        call.length_B,
        workspace.part_P2,
        workspace.parts,
        call.out_BQHL,
        call.lse_BQH,
        workspace.partial_SML,
        workspace.partial_lse_SM,
        workspace.rows,
        heads,
        queries,
        call.softmax_scale_log2,
        WIDTH=width,
        ROPE=rope,
        ROPE_COLUMN=layout.rope_offset // 2,
        SCALE_COLUMN=layout.scale_offset // 4,
        PAGE=call.page_size,
        RINGS=rings,
        STAGES=tiling.num_stages,
        FP8_VALUES=tiling.fp8_values,
        LN2=_LN2,
        num_warps=4,
    )


def _descriptor(
    rows: torch.Tensor, columns: int, box: int, swizzle: int, bits: int
) -> TensorDescriptor:
    """Bulk copy of 64 rows and ``box`` of the leading ``columns``; beyond them it reads zeros."""
    shared = gl.NVMMASharedLayout(swizzle, bits, 2)
    shape, strides = [rows.shape[0], columns], [rows.stride(0), 1]
    return TensorDescriptor(rows, shape, strides, [_BLOCK_TOKENS, box], shared)
