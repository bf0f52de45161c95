"""One call of :func:`tpla.kernels.latent_decode.latent_decode`, as its kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.arguments import require_layout, require_tensor
from tpla.kernels.decode_workspace import DecodeWorkspace


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """The arguments of ``latent_decode``; the factor of the logits is to base two."""

    q_latent_BQHL: torch.Tensor
    q_rope_BQHD: torch.Tensor
    q_scale_BQH: torch.Tensor | None
    rows_SB: torch.Tensor
    table_BN: torch.Tensor
    length_B: torch.Tensor
    layout: LatentLayout
    page_size: int
    softmax_scale_log2: float
    workspace: DecodeWorkspace
    out_BQHL: torch.Tensor
    lse_BQH: torch.Tensor

    @property
    def allows_bulk_copies(self) -> bool:
        """Whether rows and pages lie where Hopper's bulk copies can read whole tiles."""
        layout = self.layout
        aligned = layout.row_bytes % 16 == 0 and self.rows_SB.data_ptr() % 16 == 0
        aligned = aligned and not (layout.has_scale and layout.scale_offset % 16)
        return aligned and self.page_size % self.workspace.tiling.block_tokens == 0

    def check(self) -> None:
        """Every tensor fits the others.

        Raises:
            ConfigError: the row format or RoPE width is not one the kernels read.
            ValueError: a tensor does not fit.
        """
        layout, workspace = self.layout, self.workspace
        batch, queries, heads, width = self.q_latent_BQHL.shape
        rope = layout.qk_rope_head_dim
        require_layout(layout, "latent_decode")
        if self.q_scale_BQH is not None and not layout.has_scale:
            raise ValueError("quantised queries need fp8 rows; pass bf16 queries without q_scale")
        if workspace.rows != queries * heads or workspace.split_B2.shape[0] != batch:
            raise ValueError(
                f"the workspace is for {workspace.split_B2.shape[0]} requests of {workspace.rows} "
                f"query rows; got {batch} of {queries * heads}"
            )
        q_dtype = torch.bfloat16 if self.q_scale_BQH is None else torch.float8_e4m3fn
        bqh, row_shape = (batch, queries, heads), (self.rows_SB.shape[0], layout.row_bytes)
        require_tensor("q_latent", self.q_latent_BQHL, (*bqh, layout.latent_width), (q_dtype,))
        require_tensor("q_rope", self.q_rope_BQHD, (*bqh, rope), (torch.bfloat16,))
        if self.q_scale_BQH is not None:
            require_tensor("q_scale", self.q_scale_BQH, bqh, (torch.float32,))
        require_tensor("rows", self.rows_SB, row_shape, (torch.uint8,))
        pages = self.table_BN.shape[-1]
        require_tensor("table", self.table_BN, (batch, pages), (torch.int32,), contiguous=False)
        require_tensor("length", self.length_B, (batch,), (torch.int32,))
        require_tensor("out", self.out_BQHL, (*bqh, width), (torch.bfloat16, torch.float32))
        require_tensor("lse", self.lse_BQH, bqh, (torch.float32,))
