"""The torch references agree with float64 arithmetic written down naively."""

from __future__ import annotations

import math

import pytest
import torch

from tpla.core.latent_layout import KVFormat, LatentLayout, ShardPlan
from tpla.kernels.ref.blockwise_attention import blockwise_attention
from tpla.kernels.ref.latent_attention import latent_attention
from tpla.kernels.ref.latent_decode import blockwise_decode, exact_decode
from tpla.kernels.ref.latent_rows import pack_rows, quantize_latent, unpack_rows


def rows(tokens: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(tokens, width, generator=generator)
    return latent, torch.randn(tokens, 16, generator=generator)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("weight_dtype", "weight_range", "cosine"),
    [(torch.float16, 1024.0, 1e-6), (torch.float8_e4m3fn, 448.0, 5e-4)],
)
@pytest.mark.parametrize("sink", [0.0, 60.0])
def test_blockwise_weights_stay_close_to_exact_ones(
    weight_dtype: torch.dtype, weight_range: float, cosine: float, sink: float, queries: int
) -> None:
    """With a sink, the blocks after it are all below the floor.

    Its one weight is rounded once, to 2^-4 in FP8, which nothing averages out.
    """
    layout = LatentLayout(ShardPlan(32), 0, 16, KVFormat.FP8)
    latent, rope = rows(300, 32)
    latent *= torch.exp(torch.randn(300, 1, generator=torch.Generator().manual_seed(2)))
    # Of fixed seed: queries for which one token is all there is are not rounded.
    q_latent = torch.randn(queries, 4, 32, generator=torch.Generator().manual_seed(3))
    q_rope = torch.full((queries, 4, 16), 0.1)
    rope[0] = sink / (0.1 * 16 * 0.2)
    packed = pack_rows(latent, rope, layout)
    scale_QH = q_latent.abs().amax(-1) / 448.0
    q8 = (q_latent / scale_QH[..., None]).to(torch.float8_e4m3fn)
    aligned = (q_rope / scale_QH[..., None]).to(torch.bfloat16)
    out = blockwise_decode(q8, aligned, scale_QH, packed, layout, 0.2, weight_dtype, weight_range)
    table = torch.arange(300, dtype=torch.int32)[None]
    exact, _ = exact_decode(
        q8[None], aligned[None], scale_QH[None], packed, table, torch.tensor([300]), layout, 1, 0.2
    )
    difference = 1 - 2 * (out * exact[0]).sum() / (out**2 + exact[0] ** 2).sum()
    assert difference <= (2e-3 if sink and weight_range == 448.0 else cosine)
    assert weight_dtype != torch.float8_e4m3fn or sink or difference > 1e-6  # it does round


@pytest.mark.parametrize("octaves", [4.0, 12.0, 60.0])
def test_p_v_in_fp8_follows_logits_that_wander(octaves: float) -> None:
    """Over 40 blocks the largest logit rises and falls, within what a reference is held and not."""
    layout, tokens = LatentLayout(ShardPlan(32), 0, 16, KVFormat.FP8), 2560
    latent, rope = rows(tokens, 32)
    wave = torch.sin(torch.arange(tokens) / 150.0) * octaves / 2 * math.log(2)
    rope[:, 0] = wave / 0.2
    q_latent, q_rope = torch.zeros(1, 4, 32), torch.zeros(1, 4, 16)
    q_latent[..., 1], q_rope[..., 0] = 2.0, 1.0
    packed = pack_rows(latent, rope, layout)
    values, keys = unpack_rows(packed, layout)
    weights = (0.2 * (q_latent[0] @ values.T + q_rope[0] @ keys.T)).softmax(-1)
    out, exact = blockwise_attention(q_latent, q_rope, packed, layout, 0.2)[0], weights @ values
    difference = 1 - 2 * (out * exact).sum() / (out**2 + exact**2).sum()
    assert 1e-6 < difference <= 5e-4


@pytest.mark.parametrize(("queries", "cached"), [(1, 1), (3, 66), (300, 301)])
def test_attention_with_p_v_in_fp8_is_one_decode_step_a_query(queries: int, cached: int) -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, KVFormat.FP8)
    latent, rope = rows(cached, 32)
    generator = torch.Generator().manual_seed(5)
    latent *= torch.exp(torch.randn(cached, 1, generator=generator))  # later scales are larger, too
    packed = pack_rows(latent, rope, layout)
    q8 = (torch.randn(queries, 4, 32, generator=generator) * 100).to(torch.float8_e4m3fn)
    q_rope = (torch.randn(queries, 4, 16, generator=generator) * 100).to(torch.bfloat16)
    out = blockwise_attention(q8.float() / 64, q_rope.float() / 64, packed, layout, 0.2)
    for query in {0, queries // 2, queries - 1}:
        expected = blockwise_decode(
            q8[query, None], q_rope[query, None], torch.full((1, 4), 1 / 64),
            packed[: cached - queries + query + 1], layout, 0.2, torch.float8_e4m3fn, 448.0,
        )  # fmt: skip
        # A weight at the middle between two numbers goes one way in float64 and one in float32.
        torch.testing.assert_close(out[query].double(), expected[0], atol=2e-3, rtol=1e-3)


def test_p_v_in_fp8_moves_no_weight_by_more_than_a_sixteenth() -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, KVFormat.FP8)
    packed = pack_rows(*rows(500, 32), layout)
    latent, rope = unpack_rows(packed, layout)
    generator = torch.Generator().manual_seed(6)
    q_latent = torch.randn(1, 4, 32, generator=generator)
    q_rope = torch.randn(1, 4, 16, generator=generator)
    logits = 0.2 * (q_latent[0] @ latent.T + q_rope[0] @ rope.T)
    weights = logits.softmax(-1)
    # Far below the largest a weight times its scale is off by 2^-10 of 448 at most, times 2^3 for
    # the headroom of its reference; no scale here is four times another.
    bound = 2**-4 * weights + 2**3 * 4 * 2**-10 / 448 * weights.amax(-1, keepdim=True)
    error = blockwise_attention(q_latent, q_rope, packed, layout, 0.2)[0] - weights @ latent
    assert (error.abs() <= bound @ latent.abs() + 1e-6).all()
    assert error.abs().max() > 1e-4, "weights must be rounded at all"


def naive(q_latent, q_rope, latent, rope, scale):  # type: ignore[no-untyped-def]
    queries, heads = q_latent.shape[:2]
    cached = latent.shape[0]
    out = torch.zeros(queries, heads, latent.shape[1], dtype=torch.float64)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64)
    for i in range(queries):
        seen = cached - queries + i + 1
        for h in range(heads):
            logits = scale * (
                latent[:seen].double() @ q_latent[i, h].double()
                + rope[:seen].double() @ q_rope[i, h].double()
            )
            lse[i, h] = torch.logsumexp(logits, 0)
            out[i, h] = torch.softmax(logits, 0) @ latent[:seen].double()
    return out, lse


@pytest.mark.parametrize(("queries", "cached"), [(1, 1), (1, 37), (5, 5), (3, 300), (300, 301)])
def test_attention_equals_the_definition(queries: int, cached: int) -> None:
    latent, rope = rows(cached, 24)
    generator = torch.Generator().manual_seed(1)
    q_latent = torch.randn(queries, 3, 24, generator=generator)
    q_rope = torch.randn(queries, 3, 16, generator=generator)
    out, lse = latent_attention(q_latent, q_rope, latent, rope, 0.2)
    expected_out, expected_lse = naive(q_latent, q_rope, latent, rope, 0.2)
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)


def test_attention_to_nothing_is_zero() -> None:
    out, lse = latent_attention(
        torch.ones(1, 2, 8), torch.ones(1, 2, 4), torch.empty(0, 8), torch.empty(0, 4), 1.0
    )
    assert torch.equal(out, torch.zeros(1, 2, 8))
    assert torch.equal(lse, torch.full((1, 2), -math.inf))


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("width", [16, 27])
def test_rows_come_back_within_their_format(kv_format: KVFormat, width: int) -> None:
    layout = LatentLayout(ShardPlan(width), 0, 16, kv_format)
    latent, rope = rows(50, width)
    packed = pack_rows(latent, rope, layout)
    assert packed.shape == (50, layout.row_bytes) and packed.dtype == torch.uint8
    latent_back, rope_back = unpack_rows(packed, layout)
    latent_step = {"fp32": 0.0, "bf16": 2**-8, "fp8": 2**-4}[kv_format.value]
    rope_step = {"fp32": 0.0, "bf16": 2**-8, "fp8": 2**-8}[kv_format.value]
    floor = latent.abs().amax(-1, keepdim=True) * (2**-9 if kv_format is KVFormat.FP8 else 0)
    assert ((latent_back - latent).abs() <= latent.abs() * latent_step + floor + 1e-12).all()
    assert ((rope_back - rope).abs() <= rope.abs() * rope_step + 1e-12).all()


def test_scales_are_per_token_and_saturate_nothing() -> None:
    latent = torch.tensor([[448.0, -1.0], [1e-3, -2e-3], [0.0, 0.0], [1e30, 1e29]])
    values, scale = quantize_latent(latent)
    assert torch.isfinite(values.float()).all() and (scale > 0).all()
    assert values.float().abs().amax(-1).tolist() == [448.0, 448.0, 0.0, 448.0]
    torch.testing.assert_close(scale[:2], torch.tensor([1.0, 2e-3 / 448]))


def test_a_zero_latent_keeps_its_rope_key() -> None:
    layout = LatentLayout(ShardPlan(8), 0, 16, KVFormat.FP8)
    _, rope = rows(1, 8)
    _, rope_back = unpack_rows(pack_rows(torch.zeros(1, 8), rope, layout), layout)
    torch.testing.assert_close(rope_back, rope, atol=0, rtol=2**-8)


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_packing_is_repeatable_bit_by_bit(kv_format: KVFormat) -> None:
    layout = LatentLayout(ShardPlan(32, 2, 8), 1, 16, kv_format)
    latent, rope = rows(20, layout.latent_width)
    assert torch.equal(pack_rows(latent, rope, layout), pack_rows(latent, rope, layout))
