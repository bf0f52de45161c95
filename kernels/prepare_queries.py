"""Queries made ready for :mod:`tpla.kernels.latent_decode`, in one launch.

Absorption into the latent, RoPE, quantisation per (token, head) and scale domain alignment::

    q_latent = q_nope W_kc         (float32)
    s_q      = amax |q_latent| / 448
    stored:  q_latent / s_q in FP8, R(position) q_rope / s_q in BF16, s_q

One program holds one head's projection and takes one block of tokens, or, where there are many,
several: then it reads the queries of a block while it works on another.

Source: MLA, absorbed decoding; SnapMLA, fused query quantisation.

Shape suffixes: T query tokens, H heads of this rank, N nope dims, L latent elements of this rank,
D RoPE dims, P positions.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tpla.core.errors import ConfigError
from tpla.kernels.arguments import require_rotation, require_tensor
from tpla.kernels.latent_rows import to_fp8, token_scale
from tpla.kernels.rotary import rotate

_FLOATS = (torch.bfloat16, torch.float32)

_LEAST_BLOCKS = 4
"""With fewer, programs of one block, two or three to a processor, were faster on an H200."""


@triton.jit
def _prepare_kernel(
    nope_ptr,
    nope_stride_t,
    nope_stride_h,
    rope_ptr,
    rope_stride_t,
    rope_stride_h,
    weight_ptr,
    weight_stride_h,
    weight_stride_n,
    weight_stride_l,
    position_ptr,
    cos_sin_ptr,
    out_ptr,
    scale_ptr,
    rope_out_ptr,
    tokens,
    heads,
    blocks,
    NOPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    first = tl.program_id(1) * blocks * BLOCK_T
    head64 = head.to(tl.int64)
    nope = nope_ptr + head64 * nope_stride_h
    rope = rope_ptr + head64 * rope_stride_h
    dims = tl.arange(0, BLOCK_L)
    weight = weight_ptr + head64 * weight_stride_h + dims.to(tl.int64)[None, :] * weight_stride_l
    if NOPE <= BLOCK_N:
        w = _load_weight(weight, weight_stride_n, 0, NOPE, WIDTH, BLOCK_N, BLOCK_L)
        for block in tl.range(0, blocks, num_stages=STAGES):
            token = first + block * BLOCK_T + tl.arange(0, BLOCK_T)
            q = _load_nope(nope, nope_stride_t, token, tokens, 0, NOPE, BLOCK_N)
            acc = tl.dot(q, w, input_precision="ieee")
            _store(
                acc, token, head, rope, rope_stride_t, position_ptr, cos_sin_ptr, out_ptr,
                scale_ptr, rope_out_ptr, tokens, heads, WIDTH, ROPE, INTERLEAVED, QUANTIZED,
                BLOCK_L,
            )  # fmt: skip
    else:
        token = first + tl.arange(0, BLOCK_T)
        acc = tl.zeros([BLOCK_T, BLOCK_L], tl.float32)
        for start in tl.range(0, NOPE, BLOCK_N, num_stages=STAGES):
            q = _load_nope(nope, nope_stride_t, token, tokens, start, NOPE, BLOCK_N)
            w = _load_weight(weight, weight_stride_n, start, NOPE, WIDTH, BLOCK_N, BLOCK_L)
            acc = tl.dot(q, w, acc, input_precision="ieee")
        _store(
            acc, token, head, rope, rope_stride_t, position_ptr, cos_sin_ptr, out_ptr, scale_ptr,
            rope_out_ptr, tokens, heads, WIDTH, ROPE, INTERLEAVED, QUANTIZED, BLOCK_L,
        )  # fmt: skip


@triton.jit
def _load_nope(nope, stride_t, token, tokens, start, NOPE: tl.constexpr, BLOCK_N: tl.constexpr):
    n = start + tl.arange(0, BLOCK_N)
    at = token.to(tl.int64)[:, None] * stride_t + n[None, :]
    return tl.load(nope + at, mask=(token < tokens)[:, None] & (n < NOPE)[None, :], other=0.0)


@triton.jit
def _load_weight(
    weight, stride_n, start, NOPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    n = start + tl.arange(0, BLOCK_N)
    mask = (n < NOPE)[:, None] & (tl.arange(0, BLOCK_L) < WIDTH)[None, :]
    return tl.load(weight + n.to(tl.int64)[:, None] * stride_n, mask=mask, other=0.0)


@triton.jit
def _store(
    acc, token, head, rope_ptr, rope_stride_t, position_ptr, cos_sin_ptr, out_ptr, scale_ptr,
    rope_out_ptr, tokens, heads, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Quantise a block of absorbed queries, rotate its RoPE part, write both."""
    ok = token < tokens
    dims = tl.arange(0, BLOCK_L)
    rope_dims = tl.arange(0, ROPE)
    rope_at = token.to(tl.int64)[:, None] * rope_stride_t + rope_dims[None, :]
    rope = tl.load(rope_ptr + rope_at, mask=ok[:, None], other=0.0).to(tl.float32)
    rope = rotate(rope, token, ok, position_ptr, cos_sin_ptr, ROPE, INTERLEAVED)
    row = token.to(tl.int64) * heads + head
    out = out_ptr + row[:, None] * WIDTH + dims[None, :]
    out_ok = ok[:, None] & (dims < WIDTH)[None, :]
    if QUANTIZED:
        scale, inverse = token_scale(acc)
        tl.store(scale_ptr + row, scale, mask=ok)
        tl.store(out, to_fp8(acc, inverse), mask=out_ok)
        rope = rope * inverse[:, None]
    else:
        tl.store(out, acc.to(tl.bfloat16), mask=out_ok)
    rope_out = rope_out_ptr + row[:, None] * ROPE + rope_dims[None, :]
    tl.store(rope_out, rope.to(tl.bfloat16), mask=ok[:, None])


def prepare_queries(
    q_nope_THN: torch.Tensor,
    q_rope_THD: torch.Tensor,
    w_kc_HNL: torch.Tensor,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    q_latent_THL: torch.Tensor,
    q_scale_TH: torch.Tensor | None,
    q_rope_out_THD: torch.Tensor,
    interleaved: bool = True,
) -> None:
    """Absorb, rotate and quantise the queries of one layer.

    Args:
        q_nope_THN: bfloat16 or float32; any strides, contiguous in its last dim.
        q_rope_THD: likewise, same dtype or not; may be a view of the same tensor.
        w_kc_HNL: absorbed key projection of this rank, logit scales folded in; dtype of
            ``q_nope_THN``, any strides.
        position_T: int32 or int64, or ``None`` where ``q_rope_THD`` is already rotated.
        cos_sin_PD: float32 cosines, then sines, of each position, or ``None`` likewise.
        q_latent_THL: written; float8_e4m3fn with ``q_scale_TH``, else bfloat16.
        q_scale_TH: written, float32, or ``None``.
        q_rope_out_THD: written, bfloat16; divided by ``q_scale_TH`` where that is given.
        interleaved: pairs that rotate together are neighbours, not half a vector apart.

    Raises:
        ConfigError: the RoPE width is not one that the kernel knows.
        ValueError: a tensor does not fit the others.
    """
    tokens, heads, nope = q_nope_THN.shape
    width, rope = q_latent_THL.shape[-1], q_rope_THD.shape[-1]
    _check(
        q_nope_THN, q_rope_THD, w_kc_HNL, position_T, cos_sin_PD, q_latent_THL, q_scale_TH,
        q_rope_out_THD,
    )  # fmt: skip
    block_l = max(triton.next_power_of_2(width), 16)
    # Float32 products run outside the tensor cores, through tiles twice as large in bytes. In BF16
    # a projection that fits is loaded whole: every byte is asked for at once, and nothing waits.
    exact = w_kc_HNL.dtype == torch.float32
    block_t = 16 if exact else min(max(triton.next_power_of_2(max(tokens, 1)), 16), 64)
    most = 16 if exact else 128 if block_l <= 256 else 64
    block_n = min(max(triton.next_power_of_2(nope), 16), most)
    whole = nope <= block_n
    blocks = _blocks(tokens, block_t, heads, q_nope_THN.device) if whole else 1
    _prepare_kernel[(heads, triton.cdiv(tokens, blocks * block_t))](
        q_nope_THN,
        q_nope_THN.stride(0),
        q_nope_THN.stride(1),
        q_rope_THD,
        q_rope_THD.stride(0),
        q_rope_THD.stride(1),
        w_kc_HNL,
        w_kc_HNL.stride(0),
        w_kc_HNL.stride(1),
        w_kc_HNL.stride(2),
        position_T,
        cos_sin_PD,
        q_latent_THL,
        q_scale_TH,
        q_rope_out_THD,
        tokens,
        heads,
        blocks,
        NOPE=nope,
        WIDTH=width,
        ROPE=rope,
        INTERLEAVED=interleaved,
        QUANTIZED=q_scale_TH is not None,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_L=block_l,
        STAGES=2 if not whole else 3 if blocks > 1 else 1,
        num_warps=8 if block_l > 128 else 4,
    )


def _blocks(tokens: int, block_t: int, heads: int, device: torch.device) -> int:
    """Blocks of tokens that one program takes: as many as leave no processor a second program."""
    total = triton.cdiv(tokens, block_t)
    blocks = triton.cdiv(total * heads, _processors(device))
    return min(blocks, total) if blocks >= _LEAST_BLOCKS else 1


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q_nope_THN: torch.Tensor,
    q_rope_THD: torch.Tensor,
    w_kc_HNL: torch.Tensor,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    q_latent_THL: torch.Tensor,
    q_scale_TH: torch.Tensor | None,
    q_rope_out_THD: torch.Tensor,
) -> None:
    tokens, heads, nope = q_nope_THN.shape
    width, rope = q_latent_THL.shape[-1], q_rope_THD.shape[-1]
    if rope < 16 or rope & (rope - 1):
        raise ConfigError(f"RoPE width {rope} must be a power of two >= 16")
    if w_kc_HNL.shape != (heads, nope, width) or w_kc_HNL.dtype != q_nope_THN.dtype:
        raise ValueError(
            f"w_kc must be {(heads, nope, width)} {q_nope_THN.dtype}, "
            f"not {tuple(w_kc_HNL.shape)} {w_kc_HNL.dtype}"
        )
    out_dtype = torch.bfloat16 if q_scale_TH is None else torch.float8_e4m3fn
    require_tensor("q_nope", q_nope_THN, (tokens, heads, nope), _FLOATS, contiguous=False)
    require_tensor("q_rope", q_rope_THD, (tokens, heads, rope), _FLOATS, contiguous=False)
    require_tensor("q_latent", q_latent_THL, (tokens, heads, width), (out_dtype,))
    require_tensor("q_rope_out", q_rope_out_THD, (tokens, heads, rope), (torch.bfloat16,))
    if q_scale_TH is not None:
        require_tensor("q_scale", q_scale_TH, (tokens, heads), (torch.float32,))
    require_rotation(position_T, cos_sin_PD, tokens, rope)
