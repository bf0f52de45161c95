"""Decode attention at serving sizes on the GPU, against float64 on the stored values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.kernels.decode_cases import (
    DecodeCase,
    DecodeInputs,
    assert_matches,
    build,
    cosine_difference,
    exact,
)
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, LatentLayout
from tpla.kernels.decode_workspace import DecodeTiling, DecodeWorkspace, default_tiling
from tpla.kernels.hopper_decode import require_fp8_values
from tpla.kernels.latent_decode import latent_decode
from tpla.kernels.ref.latent_decode import blockwise_decode, exact_decode
from tpla.kernels.ref.latent_rows import pack_rows

pytestmark = pytest.mark.gpu
BF16, FP8 = KVFormat.BF16, KVFormat.FP8
RAGGED = (0, 1, 63, 64, 65, 127, 1000, 4097, 20000, 3)


def case(heads: int, width: int, **changes: object) -> DecodeCase:
    given = {"lengths": RAGGED, "page_size": 64, "rope": 64, "multiprocessors": 132, **changes}
    made = DecodeCase(heads=heads, width=width, **given)  # type: ignore[arg-type]
    return replace(made, tiling=default_tiling(made.layout, heads * made.queries))


CASES = [
    *[case(heads, 256) for heads in (8, 10, 16, 32, 64, 128)],
    *[case(heads, 512) for heads in (16, 64, 128)],
    case(16, 64),
    case(64, 128),
    # Between the widths of a tile, which then holds zeros beside the latent.
    *[case(heads, 224) for heads in (16, 64, 128)],
    *[case(64, width) for width in (48, 112, 272, 384)],
    case(64, 224, queries=3),
    case(64, 264),
    case(64, 256, rope=32),
    *[case(64, 256, queries=queries) for queries in (2, 3, 4)],
    case(128, 256, queries=2),
    case(64, 256, quantized=False),
    case(64, 512, quantized=False),
    *[case(heads, 256, kv_format=BF16, quantized=False) for heads in (10, 64, 128)],
    case(64, 512, kv_format=BF16, quantized=False),
    case(64, 256, kv_format=BF16, quantized=False, queries=4),
    case(64, 256, page_size=1),
    case(64, 256, page_size=16),
    case(128, 256, page_size=16),
    case(64, 256, row_align=4),
    case(64, 256, spread=4.0),
    case(64, 256, lengths=(0, 0, 0)),
    case(64, 256, lengths=(262144,)),
    case(16, 256, lengths=tuple(range(0, 5120, 10))),
]


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_matches_float64(shape: DecodeCase) -> None:
    inputs = build(shape)
    assert_matches(inputs, *inputs.run())


FP8_VALUES = [
    replace(made, tiling=replace(made.tiling, fp8_values=True))
    for made in (
        *[case(heads, 256) for heads in (16, 64, 128)],
        case(64, 64),
        case(64, 128),
        case(64, 512),
        *[case(heads, 224) for heads in (64, 128)],
        *[case(64, width) for width in (112, 288)],
        case(64, 256, queries=3),
        case(128, 256, queries=2),
        case(64, 256, lengths=(0, 0, 0)),
        case(64, 256, lengths=(262144,)),
    )
]


@pytest.mark.parametrize("shape", FP8_VALUES, ids=str)
def test_fp8_weights_match_float64(shape: DecodeCase) -> None:
    require_fp8_values(shape.layout, shape.page_size, torch.device("cuda"))
    inputs = build(shape)
    assert_matches(inputs, *inputs.run(), cosine=5e-4)


@pytest.mark.parametrize(
    "shape", [case(64, 264), case(64, 256, page_size=16), case(64, 256, row_align=4)], ids=str
)
def test_fp8_weights_are_refused_where_the_hopper_kernels_do_not_read(shape: DecodeCase) -> None:
    inputs = build(replace(shape, tiling=replace(shape.tiling, fp8_values=True)))
    with pytest.raises(ConfigError, match="needs a Hopper GPU"):
        require_fp8_values(shape.layout, shape.page_size, torch.device("cuda"))
    with pytest.raises(ConfigError, match="has no P V in fp8"):
        inputs.run()


@pytest.mark.parametrize("fp8_values", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_matches_an_emulation_of_its_recursion(heads: int, fp8_values: bool) -> None:
    shape = case(heads, 256, lengths=(1000,), spread=0.5)
    shape = replace(shape, tiling=replace(shape.tiling, fp8_values=fp8_values), multiprocessors=1)
    inputs = build(shape)
    # Of 64 rows two consumers take every other tile each, and hold references of their own.
    step = 2 if heads == 64 else 1
    shares = [_emulated(inputs, fp8_values, first, step) for first in range(step)]
    share = torch.stack([lse for _, lse in shares]).softmax(0)[..., None]
    emulated = (share * torch.stack([out for out, _ in shares])).sum(0)
    out, _ = inputs.run()
    against_exact = cosine_difference(out, exact(inputs)[0])
    against_emulation = cosine_difference(out[0], emulated)
    assert against_emulation <= (1e-5 if fp8_values else 2e-6)
    assert not fp8_values or against_emulation < against_exact


def _emulated(
    inputs: DecodeInputs, fp8_values: bool, first: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recursion over every ``step``-th tile of request 0, and its exact log-sum-exp."""
    assert inputs.q_scale_BQH is not None
    token = torch.arange(inputs.case.lengths[0], device="cuda")
    token = token[token // 64 % step == first]
    rows = inputs.rows_SB[inputs.table_BN[0][token // 64].long() * 64 + token % 64]
    query = (inputs.q_latent_BQHL[:1], inputs.q_rope_BQHD[:1], inputs.q_scale_BQH[:1])
    layout, scale = inputs.case.layout, inputs.softmax_scale
    rounding = (torch.float8_e4m3fn, 448.0) if fp8_values else (torch.float16, 1024.0)
    table = torch.arange(len(rows), dtype=torch.int32, device="cuda")[None]
    length = torch.tensor([len(rows)], dtype=torch.int32, device="cuda")
    _, lse = exact_decode(*query, rows, table, length, layout, 1, scale)
    return blockwise_decode(*(each[0] for each in query), rows, layout, scale, *rounding), lse[0]


@pytest.mark.parametrize(
    "shape",
    [
        *[case(heads, width) for heads, width in ((64, 256), (128, 256), (64, 512), (64, 224))],
        case(64, 256, kv_format=BF16, quantized=False),
        *FP8_VALUES[:3],
    ],
    ids=str,
)
def test_is_repeatable_bit_by_bit(shape: DecodeCase) -> None:
    inputs = build(shape)
    first = inputs.run()
    for _ in range(5):
        again = inputs.run()
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_the_number_of_parts_does_not_matter() -> None:
    inputs = build(case(64, 256))
    one, one_lse = inputs.run(multiprocessors=1)
    for parts in (2, 33, 132, 400):
        out, lse = inputs.run(multiprocessors=parts)
        # Partial results are rounded to BF16, which alone is 1.4e-6.
        assert cosine_difference(out, one) <= 2e-6
        torch.testing.assert_close(lse, one_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [4096, 32768, 131072])
@pytest.mark.parametrize(("fp8_values", "cosine"), [(False, 5e-6), (True, 5e-4)])
def test_the_error_is_bounded_at_every_context(
    length: int, fp8_values: bool, cosine: float, record_property: Callable[[str, object], None]
) -> None:
    """One part works on all tokens: the longest sum that its accumulators can be asked for."""
    shape = case(64, 256, lengths=(length,), spread=0.5)
    inputs = build(replace(shape, tiling=replace(shape.tiling, fp8_values=fp8_values)))
    out, _ = inputs.run(multiprocessors=1)
    difference = cosine_difference(out, exact(inputs)[0])
    record_property("tokens", length)
    record_property("pv_format", "fp8" if fp8_values else "fp16")
    record_property("cosine_difference", f"{difference:.3g}")
    assert difference <= cosine


@pytest.mark.parametrize("sink", [0.0, 6.0])
def test_a_needle_in_128k_is_found(sink: float) -> None:
    """One token answers the query; with a sink, token 0 draws most weight and says nothing."""
    length, shape = 131072, case(64, 256, lengths=(131072,), quantized=False)
    inputs = build(shape)
    inputs.q_latent_BQHL.zero_()
    inputs.q_rope_BQHD.fill_(1.0)
    latent = torch.randn(length, 256, device="cuda")
    rope = torch.randn(length, 64, device="cuda") * 0.3
    scale = inputs.softmax_scale
    rope[77777] = 16.0 / (64 * scale)
    if sink:
        rope[0], latent[0] = (16.0 + sink) / (64 * scale), 1e-3
    token = torch.arange(length, device="cuda")
    slot = inputs.table_BN[0][token // 64].long() * 64 + token % 64
    inputs.rows_SB[slot] = pack_rows(latent, rope, shape.layout)
    out, lse = inputs.run()
    assert_matches(inputs, out, lse)
    assert torch.nn.functional.cosine_similarity(out[0, 0, 0], latent[77777], dim=0) > 0.9


def test_rows_beyond_two_gigabytes_are_reached() -> None:
    inputs = build(case(16, 256, lengths=(500, 70)))
    far = 6_000_000 // 64
    rows = torch.full((far * 64 + len(inputs.rows_SB), 400), 0xFF, dtype=torch.uint8, device="cuda")
    rows[far * 64 :] = inputs.rows_SB
    near, _ = inputs.run()
    inputs.rows_SB = rows
    inputs.table_BN = torch.where(inputs.table_BN < far, inputs.table_BN + far, inputs.table_BN)
    for tma in (True, False):
        inputs.case = replace(inputs.case, tiling=replace(inputs.case.tiling, tma=tma))
        out, _ = inputs.run()
        assert cosine_difference(out, near) <= 1e-6


def test_one_graph_serves_all_lengths() -> None:
    shape = case(64, 256)
    inputs = build(shape)
    workspace = DecodeWorkspace(len(RAGGED), 1, 64, shape.layout)
    out = torch.empty(inputs.q_latent_BQHL.shape, device="cuda")
    lse = torch.empty(inputs.q_latent_BQHL.shape[:3], device="cuda")

    def step() -> None:
        workspace.schedule(inputs.length_B)
        _decode(inputs, shape.layout, workspace, out, lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shrink in (1, 2, 7, 1):
        inputs.length_B.copy_(torch.tensor(RAGGED, device="cuda") // shrink)
        out.fill_(math.nan), lse.fill_(math.nan)
        graph.replay()
        assert_matches(
            replace(inputs, case=replace(shape, lengths=tuple(inputs.length_B.tolist()))), out, lse
        )


def _decode(
    inputs: DecodeInputs,
    layout: LatentLayout,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    latent_decode(
        inputs.q_latent_BQHL, inputs.q_rope_BQHD, inputs.q_scale_BQH, inputs.rows_SB,
        inputs.table_BN, inputs.length_B, layout, 64, inputs.softmax_scale, workspace, out, lse,
    )  # fmt: skip


@pytest.mark.parametrize(
    "tiling",
    [DecodeTiling(16), DecodeTiling(64, 128, 8, 2), DecodeTiling(128, 64, 8), DecodeTiling(64, 32)],
    ids=str,
)
def test_other_tilings_agree(tiling: DecodeTiling) -> None:
    inputs = build(replace(case(64, 256, page_size=128), tiling=tiling))
    assert_matches(inputs, *inputs.run())
