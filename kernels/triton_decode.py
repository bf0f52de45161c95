"""Decode attention over packed latent rows in Triton: every row format, page size and width.

One program (a *part*, see :mod:`tpla.kernels.decode_schedule`) holds a block of query rows and
reads tiles of latent rows, which serve as keys and as values. Pages that the row alignment allows
come through the tensor memory accelerator; the tail of a request, and layouts or page sizes that it
cannot read, through plain loads clamped to the last cached token, so neither the unused rows of a
page nor block-table entries beyond the length are ever touched.

FP8 rows, with s_q and s_k the scales of a query row and of a token, and RoPE parts stored divided
by them (SnapMLA, scale domain alignment)::

    logit = softmax_scale s_q s_k (q8 k8 + (q^PE / s_q) (k^PE / s_k))
    P'    = exp(logit - m) s_k / sigma        sigma: largest s_k so far, carried like m
    out   = sigma sum(P' v8) / sum(P)

Q K runs in FP8 (queries quantised) or, as accuracy control, in BF16 (queries in BF16, latents
upcast). P V runs in FP16, to which FP8 latents convert exactly; P' is FP16 times 2^14, so that
shares down to 2^-28 of the largest keep full precision.

Shape suffixes: M query rows (Q H), K tokens of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tpla.core.errors import ConfigError
from tpla.kernels.decode_call import DecodeCall
from tpla.kernels.dependent_launch import launches_dependents

_LN2 = 0.6931471805599453
_SHIFT = 14
"""P' in FP16 is carried times 2^14."""


@triton.jit
def _attend(
    q,
    q_rope,
    row_scale,
    k,
    k_rope,
    k_scale,
    visible,
    acc,
    total,
    top,
    sigma,
    SCALED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MASKED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """One tile of the online softmax; returns acc, total, top and sigma."""
    if SCALED and not QUANTIZED:
        logits = tl.dot(q, tl.trans(k.to(tl.bfloat16)))
    else:
        logits = tl.dot(q, tl.trans(k))
    logits = tl.dot(q_rope, tl.trans(k_rope), logits)
    values = k
    if SCALED:
        values = k.to(tl.float16)
        logits = logits * k_scale[None, :]
    logits = logits * row_scale[:, None]
    if MASKED:
        logits = tl.where(visible, logits, -float("inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(logits - (new_top - SHIFT)[:, None])
    total = total * decay + tl.sum(p, 1)
    new_sigma = sigma
    if SCALED:
        new_sigma = tl.maximum(sigma, tl.max(k_scale, 0))
        decay = decay * (sigma / new_sigma)
        p = p * (k_scale * (1.0 / new_sigma))[None, :]
    p = p.to(values.dtype)
    acc = tl.dot(p, values, acc * decay[:, None])
    return acc, total, new_top, new_sigma


@triton.jit
def _decode_kernel(
    q_ptr,
    q_rope_ptr,
    q_scale_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    latent_desc,
    rope_desc,
    scale_desc,
    table_ptr,
    table_stride,
    length_ptr,
    part_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    rows,
    heads,
    queries,
    softmax_scale_log2,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    SCALE_COLUMN: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TMA: tl.constexpr,
    ROPE_TMA: tl.constexpr,
    STAGES: tl.constexpr,
    SHIFT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LN2: tl.constexpr,
):
    if DEPENDENT:  # the programs that combine splits may be launched as soon as these all run
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = m < rows
    dims = tl.arange(0, BLOCK_L)
    rope_dims = tl.arange(0, ROPE)
    in_tile = tl.arange(0, BLOCK_K)
    begin = tl.load(part_ptr + 2 * part)
    begin_tile = tl.load(part_ptr + 2 * part + 1)
    end = tl.load(part_ptr + 2 * part + 2)
    end_tile = tl.load(part_ptr + 2 * part + 3)
    for i in range(0, tl.where(end_tile > 0, end + 1, end) - begin):
        b = begin + i
        length = tl.maximum(tl.load(length_ptr + b), 0)
        tiles = (length + BLOCK_K - 1) // BLOCK_K
        first = tl.where(b == begin, begin_tile, 0)
        stop = tl.where(b == end, end_tile, tiles)
        row = b.to(tl.int64) * rows + m
        q = tl.load(
            q_ptr + row[:, None] * WIDTH + dims[None, :],
            mask=row_ok[:, None] & (dims < WIDTH)[None, :],
            other=0.0,
        )
        q_rope = tl.load(
            q_rope_ptr + row[:, None] * ROPE + rope_dims[None, :], mask=row_ok[:, None], other=0.0
        )
        row_scale = tl.full([BLOCK_M], 1.0, tl.float32) * softmax_scale_log2
        if QUANTIZED:
            row_scale *= tl.load(q_scale_ptr + row, mask=row_ok, other=0.0)
        last_seen = length - queries + m // heads
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        sigma = 1e-30 if SCALED else 1.0
        table = table_ptr + b.to(tl.int64) * table_stride
        whole = tl.maximum(length - queries + 1, 0) // BLOCK_K
        masked_from = first
        if TMA:
            masked_from = tl.minimum(tl.maximum(first, whole), stop)
            # Page ids are read one tile ahead: a load in the loop would cost the pipeline a stage.
            page = tl.load(table + first * BLOCK_K // PAGE, mask=first < masked_from, other=0)
            for tile in tl.range(first, masked_from, num_stages=STAGES):
                slot = page * PAGE + tile * BLOCK_K % PAGE
                k = latent_desc.load([slot, 0])
                if ROPE_TMA:
                    k_rope = rope_desc.load([slot, ROPE_COLUMN])
                else:
                    rope_at = (slot + in_tile).to(tl.int64)[:, None] * ROPE_STRIDE + ROPE_COLUMN
                    k_rope = tl.load(rope_ptr + rope_at + rope_dims[None, :])
                following = tl.minimum(tile + 1, masked_from - 1)
                page = tl.load(table + following * BLOCK_K // PAGE)
                k_scale = 1.0
                if SCALED:  # 16 bytes, the least that a bulk copy brings, of which 4 are the scale
                    words = scale_desc.load([slot, SCALE_COLUMN])
                    k_scale = tl.sum(tl.where(tl.arange(0, 4)[None, :] == 0, words, 0.0), 1)
                acc, total, top, sigma = _attend(
                    q, q_rope, row_scale, k, k_rope, k_scale, True, acc, total, top, sigma,
                    SCALED, QUANTIZED, False, SHIFT,
                )  # fmt: skip
        for tile in tl.range(masked_from, stop, num_stages=1 if TMA else STAGES):
            token = tile * BLOCK_K + in_tile
            visible = token[None, :] <= last_seen[:, None]
            token = tl.minimum(token, length - 1)
            slot = tl.load(table + token // PAGE).to(tl.int64) * PAGE + token % PAGE
            k = tl.load(
                latent_ptr + slot[:, None] * LATENT_STRIDE + dims[None, :],
                mask=(dims < WIDTH)[None, :],
                other=0.0,
            )
            k_rope = tl.load(
                rope_ptr + slot[:, None] * ROPE_STRIDE + ROPE_COLUMN + rope_dims[None, :]
            )
            k_scale = 1.0
            if SCALED:
                k_scale = tl.load(scale_ptr + slot * SCALE_STRIDE + SCALE_COLUMN)
            acc, total, top, sigma = _attend(
                q, q_rope, row_scale, k, k_rope, k_scale, visible, acc, total, top, sigma,
                SCALED, QUANTIZED, True, SHIFT,
            )  # fmt: skip
        out = acc * tl.where(total > 0.0, sigma / total, 0.0)[:, None]
        lse = tl.where(total > 0.0, top + tl.log2(total) - SHIFT, -float("inf"))
        store_ok = row_ok[:, None] & (dims < WIDTH)[None, :]
        if (first == 0) & (stop == tiles):
            at = row[:, None] * WIDTH + dims[None, :]
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=store_ok)
            tl.store(lse_ptr + row, lse * LN2, mask=row_ok)
        else:
            slot_row = (2 * part + tl.where(first == 0, 1, 0)).to(tl.int64) * rows + m
            at = slot_row[:, None] * WIDTH + dims[None, :]
            tl.store(partial_ptr + at, out, mask=store_ok)
            tl.store(partial_lse_ptr + slot_row, lse, mask=row_ok)


def triton_decode(call: DecodeCall) -> None:
    """Write outputs of unsplit requests, and partial results of the others.

    Raises:
        ConfigError: P V is asked for in FP8.
    """
    layout, workspace, tiling = call.layout, call.workspace, call.workspace.tiling
    if tiling.fp8_values:
        raise ConfigError(
            "the Triton kernel, which this call's rows, pages or device need, has no P V in fp8; "
            "use fp8_values=False"
        )
    _, queries, heads, width = call.q_latent_BQHL.shape
    bulk = tiling.tma and call.allows_bulk_copies
    scaled = layout.has_scale
    latent = call.rows_SB.view(torch.float8_e4m3fn if scaled else torch.bfloat16)
    rope = call.rows_SB.view(torch.bfloat16)
    scale = call.rows_SB.view(torch.float32) if scaled else None
    block_l = max(triton.next_power_of_2(width), 32)
    latent_desc = rope_desc = scale_desc = None
    if bulk:
        block_k = tiling.block_tokens
        latent_desc = _descriptor(latent, layout.latent_width, [block_k, block_l])
        if layout.rope_offset % 16 == 0:
            end = (layout.rope_offset + layout.rope_bytes) // 2
            rope_desc = _descriptor(rope, end, [block_k, layout.qk_rope_head_dim])
        if scale is not None:
            scale_desc = _descriptor(scale, scale.shape[1], [block_k, 4])
    _decode_kernel[(workspace.row_blocks, workspace.parts)](
        call.q_latent_BQHL,
        call.q_rope_BQHD,
        call.q_scale_BQH,
        latent,
        rope,
        scale,
        latent_desc,
        rope_desc,
        scale_desc,
        call.table_BN,
        call.table_BN.stride(0),
        call.length_B,
        workspace.part_P2,
        call.out_BQHL,
        call.lse_BQH,
        workspace.partial_SML,
        workspace.partial_lse_SM,
        workspace.rows,
        heads,
        queries,
        call.softmax_scale_log2,
        WIDTH=width,
        ROPE=layout.qk_rope_head_dim,
        LATENT_STRIDE=latent.stride(0),
        ROPE_STRIDE=rope.stride(0),
        SCALE_STRIDE=scale.stride(0) if scale is not None else 0,
        ROPE_COLUMN=layout.rope_offset // 2,
        SCALE_COLUMN=layout.scale_offset // 4,
        PAGE=call.page_size,
        BLOCK_M=tiling.block_rows,
        BLOCK_K=tiling.block_tokens,
        BLOCK_L=block_l,
        SCALED=scaled,
        QUANTIZED=call.q_scale_BQH is not None,
        TMA=bulk,
        ROPE_TMA=rope_desc is not None,
        STAGES=tiling.num_stages,
        SHIFT=_SHIFT if scaled else 0,
        DEPENDENT=launches_dependents(call.rows_SB.device),
        LN2=_LN2,
        num_warps=tiling.num_warps,
    )


def _descriptor(table: torch.Tensor, columns: int, block: list[int]) -> TensorDescriptor:
    """Bulk copy of ``block`` out of the leading columns; beyond them it reads zeros.

    Hopper stops with an illegal instruction when a box begins between multiples of 16 bytes.
    """
    return TensorDescriptor(table, [table.shape[0], columns], [table.stride(0), 1], block)
