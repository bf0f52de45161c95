"""Shapes and inputs of the kernel benchmarks, declared once.

Shape suffixes as in :mod:`tpla.kernels.latent_decode`; R independent sets of inputs, which a
timing walks through so that no cache holds the rows it is about to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tpla.core.latent_layout import FP8_MAX, KVFormat, LatentLayout, ShardPlan
from tpla.kernels.decode_workspace import DecodeTiling, DecodeWorkspace, default_tiling
from tpla.kernels.latent_decode import latent_decode
from tpla.kernels.ref.latent_decode import exact_decode
from tpla.kernels.ref.latent_rows import pack_rows

KV_LORA_RANK, QK_ROPE_HEAD_DIM, PAGE_SIZE = 512, 64, 64
COLD_BYTES = 600 * 2**20
"""Rows of all sets together, at least: ten times the L2 cache of an H200."""


@dataclass(frozen=True)
class KernelCase:
    """One rank's decode attention; ``context`` in tokens of each request."""

    model: str
    model_heads: int
    tp: int
    groups: int
    kv_format: KVFormat
    batch: int
    context: int
    query_len: int = 1
    fp8_weights: bool = False
    core_dims: int = 0

    @property
    def pv_format(self) -> str:
        """What P and the values are rounded to for P V; FP8 is SnapMLA's pipeline."""
        if self.kv_format is KVFormat.BF16:
            return "bf16"
        return "fp8" if self.fp8_weights else "fp16"

    @property
    def shape(self) -> tuple[object, ...]:
        """What the kernel sees: cases of different models may be the same work."""
        return (
            self.heads, self.layout.latent_width, self.kv_format, self.batch, self.context,
            self.query_len, self.fp8_weights,
        )  # fmt: skip

    @property
    def tiling(self) -> DecodeTiling:
        """The tuned tiling, with the case's way of weighting values."""
        return default_tiling(self.layout, self.query_len * self.heads, self.fp8_weights)

    @property
    def heads(self) -> int:
        """Heads of one rank: latent groups hold the same heads."""
        return self.model_heads * self.groups // self.tp

    @property
    def peer_heads(self) -> int:
        """Heads of one rank of head-sharded MLA at the same TP."""
        return self.model_heads // self.tp

    @property
    def layout(self) -> LatentLayout:
        plan = ShardPlan(KV_LORA_RANK, self.groups, self.core_dims)
        return LatentLayout(plan, 0, QK_ROPE_HEAD_DIM, self.kv_format, row_align=16)

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def bytes_read(self) -> int:
        """Latent, scale and RoPE key of each token once (row padding excluded)."""
        return self.tokens * self.layout.used_bytes

    @property
    def latent_flops(self) -> int:
        """Q K and P V over the latent."""
        return 4 * self.tokens * self.query_len * self.heads * self.layout.latent_width

    @property
    def rope_flops(self) -> int:
        return 2 * self.tokens * self.query_len * self.heads * QK_ROPE_HEAD_DIM


class Shape(NamedTuple):
    """A case at any batch and context; fields as :class:`KernelCase`'s."""

    model: str
    model_heads: int
    tp: int
    groups: int
    kv_format: KVFormat = KVFormat.FP8
    fp8_weights: bool = False
    core_dims: int = 0


SHAPES = (
    Shape("DeepSeek-V3", 128, tp=2, groups=2),
    Shape("DeepSeek-V3", 128, tp=4, groups=2),
    Shape("DeepSeek-V3", 128, tp=8, groups=2),
    Shape("DeepSeek-V3", 128, tp=2, groups=1),
    Shape("DeepSeek-V3", 128, tp=4, groups=2, kv_format=KVFormat.BF16),
    Shape("DeepSeek-V3", 128, tp=2, groups=2, fp8_weights=True),
    Shape("DeepSeek-V3", 128, tp=4, groups=2, fp8_weights=True),
    Shape("DeepSeek-V3", 128, tp=2, groups=1, fp8_weights=True),
    Shape("DeepSeek-V3", 128, tp=4, groups=4, core_dims=128),
    Shape("DeepSeek-V3", 128, tp=8, groups=4, core_dims=128),
    Shape("Kimi-K2", 64, tp=2, groups=2),
    Shape("Kimi-K2", 64, tp=4, groups=2),
    Shape("Kimi-K2", 64, tp=8, groups=2),
    Shape("DeepSeek-V2-Lite", 16, tp=2, groups=2),
    Shape("DeepSeek-V2-Lite", 16, tp=4, groups=2),
)


def cases(batches: list[tuple[int, int]]) -> list[KernelCase]:
    """Every shape at each (batch, context)."""
    return [
        KernelCase(**shape._asdict(), batch=batch, context=context)
        for batch, context in batches
        for shape in SHAPES
    ]


class DecodeBench:
    """Inputs of one case, ready to launch on any of its sets."""

    def __init__(self, case: KernelCase, quantized: bool, seed: int = 0) -> None:
        self.case, layout = case, case.layout
        generator = torch.Generator("cuda").manual_seed(seed)
        pages = -(-case.context // PAGE_SIZE)
        self.sets = max(1, -(-COLD_BYTES // (case.tokens * layout.row_bytes)))
        count = self.sets * case.batch * pages
        self.rows_SB = torch.empty(
            count * PAGE_SIZE, layout.row_bytes, dtype=torch.uint8, device="cuda"
        )
        for chunk in self.rows_SB.split(2**17):
            latent = torch.randn(
                len(chunk), layout.latent_width, generator=generator, device="cuda"
            )
            rope = torch.randn(len(chunk), QK_ROPE_HEAD_DIM, generator=generator, device="cuda")
            chunk.copy_(pack_rows(latent, rope, layout))
        order = torch.randperm(count, generator=generator, device="cuda").to(torch.int32)
        self.table_RBN = order.view(self.sets, case.batch, pages)
        self.length_B = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        shape = (case.batch, case.query_len, case.heads)
        q_latent = torch.randn(*shape, layout.latent_width, generator=generator, device="cuda")
        q_rope = torch.randn(*shape, QK_ROPE_HEAD_DIM, generator=generator, device="cuda")
        self.q_scale: torch.Tensor | None = None
        if quantized:
            self.q_scale = q_latent.abs().amax(-1) / FP8_MAX
            self.q_latent = (q_latent / self.q_scale[..., None]).to(torch.float8_e4m3fn)
            q_rope = q_rope / self.q_scale[..., None]
        else:
            self.q_latent = q_latent.to(torch.bfloat16)
        self.q_rope = q_rope.to(torch.bfloat16)
        self.out = torch.empty(*shape, layout.latent_width, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(*shape, device="cuda")
        self.softmax_scale = (128 + QK_ROPE_HEAD_DIM) ** -0.5

    def workspace(self, tiling: DecodeTiling | None = None) -> DecodeWorkspace:
        """Scratch memory of the case, scheduled."""
        case = self.case
        workspace = DecodeWorkspace(case.batch, case.query_len, case.heads, case.layout, tiling)
        workspace.schedule(self.length_B)
        return workspace

    def launch(self, workspace: DecodeWorkspace, index: int) -> None:
        """Decode once over input set ``index``."""
        latent_decode(
            self.q_latent, self.q_rope, self.q_scale, self.rows_SB, self.table_RBN[index],
            self.length_B, self.case.layout, PAGE_SIZE, self.softmax_scale, workspace, self.out,
            self.lse,
        )  # fmt: skip

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output and lse over set 0."""
        return exact_decode(
            self.q_latent, self.q_rope, self.q_scale, self.rows_SB, self.table_RBN[0],
            self.length_B, self.case.layout, PAGE_SIZE, self.softmax_scale,
        )  # fmt: skip


def cosine_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``1 - 2 sum(x y) / sum(x^2 + y^2)`` in float64; NaN when either holds one."""
    x, y = actual.double(), expected.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())
