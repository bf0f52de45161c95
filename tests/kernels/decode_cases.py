"""Inputs and float64 answers for decode attention, shared by interpreter and GPU tests.

Shape suffixes as in :mod:`tpla.kernels.latent_decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from tests.kernels.interpreter import repair_interpreter
from tpla.core.latent_layout import FP8_MAX, KVFormat, LatentLayout, ShardPlan
from tpla.kernels.decode_workspace import DecodeTiling, DecodeWorkspace
from tpla.kernels.latent_decode import latent_decode
from tpla.kernels.ref.latent_decode import exact_decode
from tpla.kernels.ref.latent_rows import pack_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    repair_interpreter()
NOWHERE = 2147480000
"""A block-table entry that no pool holds."""


@dataclass(frozen=True)
class DecodeCase:
    """One batch; ``lengths`` in tokens."""

    lengths: tuple[int, ...]
    heads: int = 4
    width: int = 32
    rope: int = 16
    kv_format: KVFormat = KVFormat.FP8
    queries: int = 1
    page_size: int = 16
    row_align: int = 16
    quantized: bool = True
    tiling: DecodeTiling = field(default_factory=lambda: DecodeTiling(16, 16, min_tiles=1))
    multiprocessors: int = 3
    spread: float = 1.0
    seed: int = 0

    @property
    def layout(self) -> LatentLayout:
        return LatentLayout(
            ShardPlan(self.width), 0, self.rope, self.kv_format, row_align=self.row_align
        )


@dataclass
class DecodeInputs:
    """Tensors of a case, the unused ones poisoned."""

    case: DecodeCase
    q_latent_BQHL: torch.Tensor
    q_rope_BQHD: torch.Tensor
    q_scale_BQH: torch.Tensor | None
    rows_SB: torch.Tensor
    table_BN: torch.Tensor
    length_B: torch.Tensor
    softmax_scale: float

    def run(self, multiprocessors: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Schedule and decode once, every output and scratch byte NaN before."""
        case = self.case
        workspace = DecodeWorkspace(
            len(case.lengths),
            case.queries,
            case.heads,
            case.layout,
            case.tiling,
            multiprocessors or case.multiprocessors,
            DEVICE,
        )
        workspace.partial_SML.fill_(math.nan)
        workspace.partial_lse_SM.fill_(math.nan)
        out_BQHL = torch.full(self.q_latent_BQHL.shape, math.nan, device=DEVICE)
        lse_BQH = torch.full(self.q_latent_BQHL.shape[:3], math.nan, device=DEVICE)
        workspace.schedule(self.length_B)
        return latent_decode(
            self.q_latent_BQHL,
            self.q_rope_BQHD,
            self.q_scale_BQH,
            self.rows_SB,
            self.table_BN,
            self.length_B,
            case.layout,
            case.page_size,
            self.softmax_scale,
            workspace,
            out_BQHL,
            lse_BQH,
        )


def build(case: DecodeCase) -> DecodeInputs:
    """Random queries and rows of ``case``; pages in random order, unused bytes NaN."""
    generator = torch.Generator(DEVICE).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    layout, batch = case.layout, len(case.lengths)
    pages = [-(-length // case.page_size) for length in case.lengths]
    shape = (batch, case.queries, case.heads)
    q_latent, q_rope = normal(*shape, case.width), normal(*shape, case.rope)
    q_scale = None
    if case.quantized:
        q_scale = q_latent.abs().amax(-1) / FP8_MAX
        q_latent = (q_latent / q_scale[..., None]).to(torch.float8_e4m3fn)
        q_rope = q_rope / q_scale[..., None]
    else:
        q_latent = q_latent.to(torch.bfloat16)
    slots = (sum(pages) + 2) * case.page_size
    rows_SB = torch.full((slots, layout.row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    table = torch.full((batch, max(pages, default=0) + 2), NOWHERE, dtype=torch.int32)
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(case.seed))
    taken = 0
    for request, length in enumerate(case.lengths):
        own = order[taken : taken + pages[request]]
        taken += pages[request]
        table[request, : len(own)] = own.int()
        token = torch.arange(length)
        slot = own[token // case.page_size] * case.page_size + token % case.page_size
        size = torch.exp(case.spread * normal(length, 1))
        rows_SB[slot.to(DEVICE)] = pack_rows(
            normal(length, case.width) * size, normal(length, case.rope), layout
        )
    return DecodeInputs(
        case,
        q_latent.contiguous(),
        q_rope.to(torch.bfloat16),
        q_scale,
        rows_SB,
        table.to(DEVICE),
        torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE),
        (case.width + case.rope) ** -0.5,
    )


def exact(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer in float64 on the stored values."""
    return exact_decode(
        inputs.q_latent_BQHL,
        inputs.q_rope_BQHD,
        inputs.q_scale_BQH,
        inputs.rows_SB,
        inputs.table_BN,
        inputs.length_B,
        inputs.case.layout,
        inputs.case.page_size,
        inputs.softmax_scale,
    )


def cosine_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``1 - 2 sum(x y) / sum(x^2 + y^2)`` in float64 (FlashMLA's measure)."""
    x, y = actual.double(), expected.double()
    norm = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / norm) if norm > 0 else 0.0


def assert_matches(
    inputs: DecodeInputs, out: torch.Tensor, lse: torch.Tensor, cosine: float = 5e-6
) -> None:
    """Finite where the answer is, close in cosine and per element."""
    expected_out, expected_lse = exact(inputs)
    assert torch.equal(torch.isinf(lse), torch.isinf(expected_lse)) and not lse.isnan().any()
    assert torch.isfinite(out).all()
    assert cosine_difference(out, expected_out) <= cosine
    seen = torch.isfinite(expected_lse)
    # FP8 tensor cores keep about 13 bits of a sum, so a logit errs in proportion to its size.
    atol = 1e-4 + (2e-3 * float(expected_lse[seen].abs().max()) if seen.any() else 0.0)
    torch.testing.assert_close(lse.double()[seen], expected_lse[seen], atol=atol, rtol=1e-5)
    share = 0.06 if inputs.case.quantized else 0.02
    if inputs.case.tiling.fp8_values:  # a weight keeps three bits, so it may be off by a sixteenth
        share += 2.0**-4
    row_max = expected_out.abs().amax(-1, keepdim=True)
    assert ((out.double() - expected_out).abs() <= share * row_max + 1e-12).all()
