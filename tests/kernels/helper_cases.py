"""Inputs and checks of the kernels around decode attention, shared by interpreter and GPU tests.

Kernel and reference compute in float32, with sums in another order and a product with the scale's
reciprocal where the reference divides. So their quotients differ by a few units in the last place,
and an FP8 code or a BF16 value by one step, only where the exact quotient lies next to a tie.

Shape suffixes as in the kernels' modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.decode_cases import DEVICE
from tpla.core.latent_layout import AMAX_FLOOR, FP8_MAX, KVFormat, LatentLayout, ShardPlan
from tpla.kernels.append_latents import append_latents
from tpla.kernels.fetch_latents import fetch_latents
from tpla.kernels.gather_pages import gather_pages
from tpla.kernels.prepare_queries import prepare_queries
from tpla.kernels.ref import append_latents as ref_append
from tpla.kernels.ref import fetch_latents as ref_fetch
from tpla.kernels.ref import gather_pages as ref_gather
from tpla.kernels.ref import prepare_queries as ref_prepare
from tpla.kernels.ref import scatter_pages as ref_scatter
from tpla.kernels.ref.pointed_memory import page_slots
from tpla.kernels.ref.rotary import rotate
from tpla.kernels.scatter_pages import scatter_pages

BF16, FP8 = KVFormat.BF16, KVFormat.FP8
POISON = 0xFF
"""A byte of which FP8, BF16 and float32 NaNs are made."""
NEAR = 4e-6
"""Relative distance from a tie within which either neighbour is right; some 32 float32 ulps."""
SUM = 2e-5
"""Error of float32 sums of a few hundred products, against float64, relative to the largest."""
_TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}


def repair_conversions() -> None:
    """Round in the interpreter as the GPU does.

    Triton 3.6's interpreter cuts float32 off to BF16 and loses the carry of a rounded FP8 mantissa.
    """
    convert = interpreter._convert_float
    if getattr(convert, "repaired", False):
        return

    def repaired(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in _TORCH or target not in _TORCH:
            return convert(bits, source, target, rounding)
        numpy_in, _ = _BITS[bits.itemsize]
        values = torch.from_numpy(np.array(bits).view(numpy_in)).view(_TORCH[source])
        out = values.to(_TORCH[target])
        size = out.element_size()
        return out.view(_BITS[size][1]).numpy().view(f"uint{8 * size}")

    repaired.repaired = True  # type: ignore[attr-defined]
    interpreter._convert_float = repaired


if DEVICE == "cpu":
    repair_conversions()


@dataclass(frozen=True)
class RowCase:
    """Tokens of one layer on one rank; ``width`` is the rank's latent, core included."""

    tokens: int
    width: int = 64
    core: int = 0
    groups: int = 2
    group: int = 1
    rope: int = 32
    kv_format: KVFormat = FP8
    row_align: int = 16
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def layout(self) -> LatentLayout:
        rank = self.core + self.groups * (self.width - self.core)
        return LatentLayout(
            ShardPlan(rank, self.groups, self.core), self.group, self.rope, self.kv_format,
            row_align=self.row_align,
        )  # fmt: skip


@dataclass(frozen=True)
class AppendCase(RowCase):
    """Options of ``append_latents``; ``skipped`` tokens go to slot -1."""

    rotated: bool = True
    interleaved: bool = True
    gamma: bool = True
    strided: bool = True
    position_dtype: torch.dtype = torch.int64
    skipped: int = 0


@dataclass(frozen=True)
class PageCase(RowCase):
    """``tokens`` is not used: ``pages`` of ``page_size`` are."""

    tokens: int = 0
    layers: int = 3
    pages: int = 3
    page_size: int = 4
    page_dtype: torch.dtype = torch.int32


@dataclass(frozen=True)
class QueryCase:
    """Queries of one layer on one rank."""

    tokens: int
    heads: int = 3
    nope: int = 32
    width: int = 64
    rope: int = 32
    quantized: bool = True
    rotated: bool = True
    interleaved: bool = True
    dtype: torch.dtype = torch.bfloat16
    strided_weight: bool = False
    seed: int = 0


class Source:
    """Random tensors of one case, on the device under test."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=DEVICE).to(dtype)

    def sized(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows of widely varying size."""
        return (self.normal(*shape) * torch.exp(2 * self.normal(*shape[:-1], 1))).to(dtype)

    def distinct(self, count: int, limit: int) -> torch.Tensor:
        return torch.randperm(limit, generator=self._generator, device=DEVICE)[:count]

    def rotation(
        self, tokens: int, rope: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and their cosines and sines, of a table that only they are read from."""
        table = torch.full((4 * tokens + 8, rope), math.nan, device=DEVICE)
        position = self.distinct(tokens, len(table)).to(dtype)
        angle = self.normal(tokens, rope // 2) * 3
        table[position.long()] = torch.cat((angle.cos(), angle.sin()), -1)
        return position, table


def poisoned(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Contiguous memory whose every byte is poison."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.full((size,), POISON, dtype=torch.uint8, device=DEVICE)
    return memory.view(dtype).view(shape)


def step_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbours of ``dtype`` at float64 ``values``."""
    bits, least = {torch.float8_e4m3fn: (3, 2.0**-9), torch.bfloat16: (7, 0.0)}[dtype]
    exponent = torch.floor(torch.log2(values.abs().clamp_min(1e-300)))
    return torch.exp2(exponent - bits).clamp_min(least)


def assert_nearest(actual: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> None:
    """``actual`` is the value of its dtype next to ``exact`` (float64), up to ``slack`` of it."""
    error = (actual.double() - exact).abs()
    assert (error <= step_of(exact, actual.dtype) / 2 + slack).all()  # never for a NaN


def assert_neighbours(
    actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor
) -> None:
    """Values of kernel and reference are the same, or a step apart, up to ``slack``."""
    apart = (actual.double() - expected.double()).abs()
    assert (apart <= step_of(exact, actual.dtype) + slack).all()


def row_parts(
    rows_TB: torch.Tensor, layout: LatentLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Latent, RoPE key, scale (if any) and padding bytes of some rows, as stored."""
    rows = rows_TB.contiguous()
    rope_end = layout.rope_offset + layout.rope_bytes
    latent = rows[:, : layout.latent_bytes].contiguous()
    rope = rows[:, layout.rope_offset : rope_end].contiguous().view(torch.bfloat16)
    padding = torch.cat(
        [
            rows[:, layout.latent_bytes : layout.rope_offset],
            rows[:, rope_end : layout.scale_offset],
            rows[:, layout.used_bytes :],
        ],
        -1,
    )
    if not layout.has_scale:
        return latent.view(torch.bfloat16), rope, None, padding
    scale = rows[:, layout.scale_offset : layout.used_bytes].contiguous().view(torch.float32)
    return latent.view(torch.float8_e4m3fn), rope, scale[:, 0], padding


def assert_rows_match(
    rows_TB: torch.Tensor,
    expected_TB: torch.Tensor,
    latent_TL: torch.Tensor,
    rope_TD: torch.Tensor,
    layout: LatentLayout,
) -> None:
    """Rows agree with the reference's, and encode float64 ``latent_TL`` and ``rope_TD``."""
    stored, expected = row_parts(rows_TB, layout), row_parts(expected_TB, layout)
    if layout.has_scale:
        scale = latent_TL.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR) / FP8_MAX
        latent_TL, rope_TD = latent_TL / scale, rope_TD / scale
    latent_slack = NEAR * latent_TL.abs()
    rope_slack = NEAR * rope_TD.abs().amax(-1, keepdim=True)
    assert_neighbours(stored[0], expected[0], latent_TL, latent_slack)
    assert_neighbours(stored[1], expected[1], rope_TD, rope_slack)
    # Both are held to it, so where they differ the exact value lies next to a tie.
    for latent, rope, stored_scale, padding in (stored, expected):
        assert not padding.any()
        assert_nearest(latent, latent_TL, latent_slack)
        assert_nearest(rope, rope_TD, rope_slack)
        if stored_scale is not None:
            torch.testing.assert_close(stored_scale.double(), scale[:, 0], atol=0, rtol=1e-6)


def exact_rotation(
    rope: torch.Tensor,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    """RoPE as a complex product, in float64."""
    x = rope.double()
    if position_T is None or cos_sin_PD is None:
        return x
    half = x.shape[-1] // 2
    angle = cos_sin_PD.double()[position_T.long()]
    turn = torch.complex(angle[:, :half], angle[:, half:]).view(len(x), *[1] * (x.dim() - 2), half)
    pair = x.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pair.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * turn
    return torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)


def exact_part(latent_TC: torch.Tensor, layout: LatentLayout) -> torch.Tensor:
    """The rank's part, dim by dim."""
    plan = layout.plan
    first = plan.core_dims + layout.group * plan.slice_width
    dims = [*range(plan.core_dims), *range(first, first + plan.slice_width)]
    return latent_TC[..., dims]


def append_inputs(case: AppendCase, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and RoPE keys, as views of one poisoned tensor where the case asks for that."""
    rank, rope, tokens = case.layout.plan.kv_lora_rank, case.rope, case.tokens
    latent_TC = source.sized(tokens, rank, dtype=case.dtype)
    rope_TD = source.normal(tokens, rope, dtype=case.dtype)
    if not case.strided:
        return latent_TC, rope_TD
    whole = poisoned(tokens, rank + rope + 8, dtype=case.dtype)
    whole[:, :rank], whole[:, rank : rank + rope] = latent_TC, rope_TD
    return whole[:, :rank], whole[:, rank : rank + rope]


def check_append(case: AppendCase) -> None:
    """Kernel, reference and float64 agree; other slots keep their bytes; the same bits twice."""
    source, layout, tokens = Source(case.seed), case.layout, case.tokens
    latent, rope = append_inputs(case, source)
    rank = layout.plan.kv_lora_rank
    gamma = 1 + source.normal(rank, dtype=case.dtype) / 8 if case.gamma else None
    slot = source.distinct(tokens, 2 * tokens + 3)
    if case.skipped:
        slot[source.distinct(case.skipped, tokens)] = -1
    stored = slot >= 0
    position, table = None, None
    if case.rotated:
        position, table = source.rotation(tokens, case.rope, case.position_dtype)
    results = []
    for append in (append_latents, append_latents, ref_append.append_latents):
        rows = poisoned(2 * tokens + 3, layout.row_bytes)
        append(latent, rope, gamma, 1e-6, position, table, slot, layout, rows, case.interleaved)
        results.append(rows)
    rows, again, expected = results
    assert torch.equal(rows, again)
    unused = torch.ones(len(rows), dtype=torch.bool, device=DEVICE)
    unused[slot[stored]] = False
    assert (rows[unused] == POISON).all()
    x = latent.double()
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    x = exact_part(x if gamma is None else x * gamma.double(), layout)
    turned = exact_rotation(rope, position, table, case.interleaved)
    at = slot[stored]
    assert_rows_match(rows[at], expected[at], x[stored], turned[stored], layout)


def check_queries(case: QueryCase) -> None:
    """Kernel, reference and float64 agree; the same bits twice."""
    source, tokens, heads = Source(case.seed), case.tokens, case.heads
    q = source.sized(tokens, heads, case.nope + case.rope, dtype=case.dtype)
    nope, rope = q.split([case.nope, case.rope], -1)
    weight = source.normal(heads, case.nope, case.width, dtype=case.dtype) * case.nope**-0.5
    if case.strided_weight:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    position, table = None, None
    if case.rotated:
        position, table = source.rotation(tokens, case.rope, torch.int64)
    results = []
    for prepare in (prepare_queries, prepare_queries, ref_prepare.prepare_queries):
        dtype = torch.float8_e4m3fn if case.quantized else torch.bfloat16
        latent = poisoned(tokens, heads, case.width, dtype=dtype)
        scale = poisoned(tokens, heads, dtype=torch.float32) if case.quantized else None
        turned = poisoned(tokens, heads, case.rope, dtype=torch.bfloat16)
        prepare(nope, rope, weight, position, table, latent, scale, turned, case.interleaved)
        results.append((latent, scale, turned))
    for one, other in zip(*results[:2], strict=True):
        assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    exact = torch.einsum("thn,hnl->thl", nope.double(), weight.double())
    turned = exact_rotation(rope, position, table, case.interleaved)
    assert_queries_match(results[0], results[2], exact, turned)


Queries = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def assert_queries_match(
    found: Queries, expected: Queries, latent_THL: torch.Tensor, rope_THD: torch.Tensor
) -> None:
    """Queries agree with the reference's, and encode float64 ``latent_THL`` and ``rope_THD``."""
    scale = latent_THL.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR) / FP8_MAX
    if found[1] is not None:
        latent_THL, rope_THD = latent_THL / scale, rope_THD / scale
    latent_slack = SUM * latent_THL.abs().amax(-1, keepdim=True)
    rope_slack = SUM * rope_THD.abs().amax(-1, keepdim=True)
    assert_neighbours(found[0], expected[0], latent_THL, latent_slack)
    assert_neighbours(found[2], expected[2], rope_THD, rope_slack)
    for latent, stored_scale, rope in (found, expected):
        assert_nearest(latent, latent_THL, latent_slack)
        assert_nearest(rope, rope_THD, rope_slack)
        if stored_scale is not None:
            torch.testing.assert_close(stored_scale.double(), scale[..., 0], atol=0, rtol=SUM / 2)


@dataclass
class Pools:
    """Prefill pools of all layers, poisoned where no page of the case lies."""

    case: PageCase
    pools: list[torch.Tensor]
    pointer_Y: torch.Tensor
    pages_N: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.case.pages * self.case.page_size


def pointers(buffers: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of ``buffers``, on the device."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)


def build_pools(case: PageCase) -> Pools:
    """Random pages of ``case`` in random places."""
    source, rank = Source(case.seed), case.layout.plan.kv_lora_rank
    limit = 2 * case.pages + 3
    pages = source.distinct(case.pages, limit)
    slot = page_slots(pages, case.page_size)
    pools = []
    for _ in range(case.layers):
        pool = poisoned(limit * case.page_size, rank + case.rope, dtype=case.dtype)
        pool[slot, :rank] = source.sized(len(slot), rank, dtype=case.dtype)
        pool[slot, rank:] = source.normal(len(slot), case.rope, dtype=case.dtype)
        pools.append(pool)
    return Pools(case, pools, pointers(pools), pages.to(case.page_dtype))


def gather(pools: Pools, kernel: Callable[..., None]) -> torch.Tensor:
    """Rows ``[Y, T, B]`` of the case's pages, staged in poison."""
    case = pools.case
    staging = poisoned(case.layers, pools.tokens, case.layout.row_bytes)
    kernel(pools.pointer_Y, case.dtype, pools.pages_N, case.page_size, case.layout, staging)
    return staging


def scatter(
    staging: torch.Tensor, pages_N: torch.Tensor, case: PageCase, kernel: Callable[..., None]
) -> list[torch.Tensor]:
    """Decode pools of all layers after ``staging`` was written to ``pages_N`` of them."""
    slots = (2 * case.pages + 3) * case.page_size
    pools = [poisoned(slots, case.layout.row_bytes) for _ in range(case.layers)]
    kernel(staging, pointers(pools), pages_N, case.page_size, case.layout)
    return pools


def check_migration(case: PageCase) -> None:
    """Gather, scatter and fetch agree with their references, one by one and in a row."""
    pools, layout = build_pools(case), case.layout
    rank = layout.plan.kv_lora_rank
    staging, expected = gather(pools, gather_pages), gather(pools, ref_gather.gather_pages)
    assert torch.equal(staging, gather(pools, gather_pages))
    slot = page_slots(pools.pages_N, case.page_size)
    for pool, rows_TB, expected_TB in zip(pools.pools, staging, expected, strict=True):
        cached = pool[slot].double()
        assert_rows_match(
            rows_TB, expected_TB, exact_part(cached[:, :rank], layout), cached[:, rank:], layout
        )
    target = Source(case.seed + 1).distinct(case.pages, 2 * case.pages + 3).to(case.page_dtype)
    written = scatter(staging, target, case, scatter_pages)
    reference = scatter(staging, target, case, ref_scatter.scatter_pages)
    target_slot = page_slots(target, case.page_size)
    for pool, other, rows_TB in zip(written, reference, staging, strict=True):
        assert torch.equal(pool, other)  # poison elsewhere included
        check_fetch(pool, rows_TB, target_slot, layout)


def check_fetch(
    pool_SB: torch.Tensor, rows_TB: torch.Tensor, slot_T: torch.Tensor, layout: LatentLayout
) -> None:
    """``pool_SB`` at ``slot_T`` decodes to what ``rows_TB`` encode, bit by bit."""
    width, rope, tokens = layout.latent_width, layout.qk_rope_head_dim, len(slot_T)
    fetched = poisoned(tokens, width + rope + 4, dtype=torch.bfloat16)
    fetch_latents(pool_SB, slot_T, layout, fetched[:, :width], fetched[:, width : width + rope])
    expected = poisoned(tokens, width + rope + 4, dtype=torch.bfloat16)
    ref_fetch.fetch_latents(
        rows_TB, torch.arange(tokens, device=DEVICE), layout, expected[:, :width],
        expected[:, width : width + rope],
    )  # fmt: skip
    assert torch.equal(fetched.view(torch.int16), expected.view(torch.int16))


def check_reference_rotation(interleaved: bool) -> None:
    """The reference's rotation is the complex product."""
    source = Source(0)
    position, table = source.rotation(7, 32, torch.int32)
    rope = source.normal(7, 3, 32)
    turned = rotate(rope, position, table, interleaved)
    exact = exact_rotation(rope, position, table, interleaved)
    torch.testing.assert_close(turned.double(), exact, atol=1e-6, rtol=1e-6)
