"""Decode attention, its schedule and its combine step, at sizes the Triton interpreter can bear.

Runs under ``TRITON_INTERPRET=1`` (see test_interpreter.py) or on a GPU.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.kernels.decode_cases import DEVICE, DecodeCase, assert_matches, build
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat
from tpla.kernels.combine_splits import combine_splits
from tpla.kernels.decode_schedule import OVERHEAD, SNAP, decode_schedule
from tpla.kernels.decode_workspace import DecodeTiling, DecodeWorkspace
from tpla.kernels.ref import combine_splits as ref_combine
from tpla.kernels.ref import decode_schedule as ref_schedule
from tpla.kernels.ref import latent_decode as ref_decode
from tpla.kernels.ref.latent_rows import pack_rows

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreter.py", allow_module_level=True)

BF16, FP8 = KVFormat.BF16, KVFormat.FP8
RAGGED = (0, 1, 15, 16, 17, 100)
SMALL = DecodeTiling(16, 16, min_tiles=1)

CASES = [
    DecodeCase(RAGGED),
    DecodeCase(RAGGED, queries=3),
    DecodeCase(RAGGED, kv_format=BF16, quantized=False),
    DecodeCase(RAGGED, kv_format=BF16, quantized=False, queries=4),
    DecodeCase(RAGGED, quantized=False, queries=2),
    DecodeCase(RAGGED, page_size=1),
    DecodeCase((70, 3), page_size=64, tiling=replace(SMALL, block_tokens=32)),
    DecodeCase((70, 3), page_size=4),
    DecodeCase((40, 33), row_align=4),
    DecodeCase((40, 33), width=48, heads=3),
    DecodeCase((40, 33), width=36, heads=3, row_align=4),
    DecodeCase((40, 33), heads=10, queries=2),
    DecodeCase((40, 33), tiling=replace(SMALL, tma=False)),
    DecodeCase((90,), spread=4.0),
    DecodeCase((0, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: DecodeCase) -> None:
    inputs = build(case)
    assert_matches(inputs, *inputs.run())


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_reference_matches_float64(case: DecodeCase) -> None:
    inputs = build(case)
    out = torch.full(inputs.q_latent_BQHL.shape, math.nan, device=DEVICE)
    lse = torch.full(out.shape[:3], math.nan, device=DEVICE)
    ref_decode.latent_decode(
        inputs.q_latent_BQHL, inputs.q_rope_BQHD, inputs.q_scale_BQH, inputs.rows_SB,
        inputs.table_BN, inputs.length_B, case.layout, case.page_size, inputs.softmax_scale,
        None, out, lse,
    )  # fmt: skip
    assert_matches(inputs, out, lse)


@pytest.mark.parametrize("kv_format", [BF16, FP8])
def test_the_number_of_parts_does_not_matter(kv_format: KVFormat) -> None:
    inputs = build(DecodeCase((150, 33), kv_format=kv_format, quantized=kv_format is FP8))
    one, one_lse = inputs.run(multiprocessors=1)
    for parts in (2, 7):
        out, lse = inputs.run(multiprocessors=parts)
        atol = 4e-3 if kv_format is FP8 else 2e-2
        torch.testing.assert_close(out, one, atol=atol, rtol=4e-3)
        torch.testing.assert_close(lse, one_lse, atol=1e-5, rtol=1e-5)


def test_is_repeatable_bit_by_bit() -> None:
    inputs = build(DecodeCase((100, 40), queries=2))
    first, second = inputs.run(), inputs.run()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_needle_beside_a_sink_with_a_tiny_latent() -> None:
    """The largest logit belongs to a token whose values are next to nothing."""
    inputs = build(DecodeCase((80,), heads=1, quantized=False, spread=0.0))
    inputs.q_latent_BQHL.zero_()
    inputs.q_rope_BQHD.fill_(1.0)
    latent, rope = torch.randn(80, 32), torch.full((80, 16), -1.0)
    latent[0], rope[0] = 1e-4, 1.5
    rope[50] = 1.0
    packed = ref_rows(latent, rope, inputs.case)
    token = torch.arange(80)
    slot = inputs.table_BN[0].cpu()[token // 16].long() * 16 + token % 16
    inputs.rows_SB[slot.to(DEVICE)] = packed.to(DEVICE)
    assert_matches(inputs, *inputs.run())


def ref_rows(latent: torch.Tensor, rope: torch.Tensor, case: DecodeCase) -> torch.Tensor:
    return pack_rows(latent, rope, case.layout)


def schedules(lengths: list[int], parts: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cuts of the parts and splits of the requests, by the kernel as by its reference."""
    length_B = torch.tensor(lengths, dtype=torch.int32)
    results = []
    for schedule, device in ((decode_schedule, DEVICE), (ref_schedule.decode_schedule, "cpu")):
        part = torch.full((parts + 1, 2), -1, dtype=torch.int32, device=device)
        split = torch.full((len(lengths), 2), -1, dtype=torch.int32, device=device)
        schedule(length_B.to(device), part, split, 16, 3)
        results.append((part.cpu().tolist(), split.cpu().tolist()))
    assert results[0] == results[1]
    cuts, splits = results[0]
    batch = len(lengths)
    assert cuts[0] == [0, 0] and cuts[-1] == [batch, 0] and cuts == sorted(cuts)
    for request, (first, last) in enumerate(splits):
        assert cuts[first] <= [request, 0] and cuts[last + 1] >= [request + 1, 0]
    return cuts, splits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parts", [1, 5, 33])
def test_schedule_matches_its_reference(parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, 400 * seed + 2, (7,), generator=generator, dtype=torch.int32)
    length_B[seed] = 0
    schedules(length_B.tolist(), parts)


@pytest.mark.parametrize(("batch", "parts"), [(32, 33), (33, 33), (65, 33), (66, 33)])
def test_requests_of_nearly_one_length_stay_whole(batch: int, parts: int) -> None:
    cuts, splits = schedules([16 * 60 + 16 * (i % 3) for i in range(batch)], parts)
    assert all(first == last for first, last in splits)
    assert all(tile == 0 for _, tile in cuts)


@pytest.mark.parametrize("lengths", [[960] * 20, [960] * 29 + [2400], [16000] * 40])
def test_requests_are_cut_where_whole_ones_would_unbalance_parts(lengths: list[int]) -> None:
    cuts, splits = schedules(lengths, 33)
    assert any(first < last for first, last in splits)
    shares = [b - a for a, b in pairwise(positions(cuts, lengths))]
    assert max(shares) <= sum(shares) / 33 + 1 + 2 * (SNAP + 1)


def positions(cuts: list[list[int]], lengths: list[int]) -> list[int]:
    """Where cuts lie when all tiles, and what beginning a request costs, lie on one line."""
    costs = [-(-length // 16) + OVERHEAD for length in lengths]
    return [sum(costs[:request]) + (tile and tile + OVERHEAD) for request, tile in cuts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("programs", [4, 4096], ids=["two-rows-each", "a-row-each"])
@pytest.mark.parametrize("parts", [1, 2, 18, 150])
def test_combine_matches_its_reference(
    parts: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpla.kernels.combine_splits._PROGRAMS", programs)
    generator = torch.Generator().manual_seed(parts)
    slots, rows, width = 2 * parts + 6, 3, 40
    partial = torch.randn(slots, rows, width, generator=generator).to(DEVICE, dtype)
    lse = (torch.randn(slots, rows, generator=generator) * 5).to(DEVICE)
    lse[2:6, 1] = -math.inf
    split = torch.tensor([[1, parts], [parts, parts]], dtype=torch.int32, device=DEVICE)
    results = []
    for combine in (combine_splits, ref_combine.combine_splits):
        out = torch.full((2, rows, width), 7.0, device=DEVICE)
        out_lse = torch.full((2, rows), 7.0, device=DEVICE)
        combine(partial, lse, split, out, out_lse)
        results.append((out, out_lse))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    assert (results[0][0][1] == 7.0).all()


def test_bad_arguments_are_refused() -> None:
    inputs = build(DecodeCase((20,)))
    with pytest.raises(ConfigError, match="fp32"):
        replace_case(inputs, kv_format=KVFormat.FP32)
    with pytest.raises(ConfigError, match="has no P V in fp8"):
        build(DecodeCase((20,), tiling=replace(SMALL, fp8_values=True))).run()
    inputs = build(DecodeCase((20,)))
    inputs.table_BN = inputs.table_BN.long()
    with pytest.raises(ValueError, match=r"table must be .*int32"):
        inputs.run()
    with pytest.raises(ValueError, match="length must be contiguous int32"):
        DecodeWorkspace(1, 1, 4, inputs.case.layout, SMALL, 2, DEVICE).schedule(
            inputs.length_B.long()
        )


def replace_case(inputs, **changes) -> None:  # type: ignore[no-untyped-def]
    inputs.case = replace(inputs.case, **changes)
    inputs.run()
