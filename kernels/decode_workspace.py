"""How a decode step is divided among programs, and the memory that takes.

Shape suffixes: B requests, P parts, S slots of partial results, M query rows, L latent elements.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import triton

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.decode_schedule import decode_schedule


@dataclass(frozen=True)
class DecodeTiling:
    """How one program works.

    Attributes:
        block_rows: query rows of a program, 16 or more, a power of two.
        block_tokens: tokens of a tile, a power of two.
        num_warps: warps of a program; the Hopper kernel has its own.
        num_stages: tiles in flight; the Hopper kernel takes what shared memory holds.
        programs_per_sm: programs that share a multiprocessor.
        min_tiles: least tiles of a part, per-request overhead included.
        tma: read whole pages through the tensor memory accelerator where the layout allows.
        hopper: run :mod:`tpla.kernels.hopper_decode` where device, rows and pages allow.
        fp8_values: there, P V in FP8 rather than FP16.
    """

    block_rows: int
    block_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 1
    min_tiles: int = 4
    tma: bool = True
    hopper: bool = False
    fp8_values: bool = False


def default_tiling(layout: LatentLayout, rows: int, fp8_values: bool = False) -> DecodeTiling:
    """Tiling for ``rows`` query rows (query length times heads) over rows of ``layout``."""
    block_rows = 128 if rows > 64 and layout.latent_width <= 256 else 64
    if layout.has_scale:
        return DecodeTiling(block_rows, num_warps=8, hopper=True, fp8_values=fp8_values)
    num_warps, num_stages = 4, 4
    if layout.latent_width > 256:
        num_warps, num_stages = 8, 2
    elif rows > 64:
        num_warps, num_stages = 8, 3
    return DecodeTiling(
        block_rows, num_warps=num_warps, num_stages=num_stages, fp8_values=fp8_values
    )


class DecodeWorkspace:
    """Scratch memory and schedule of :func:`latent_decode` for one shape of batch.

    Build it before a CUDA graph is captured; call :meth:`schedule` once a step, inside the graph,
    then :func:`latent_decode` for every layer. Its memory does not depend on lengths.

    Args:
        batch: requests.
        queries: query tokens of each request.
        heads: heads of this rank.
        layout: row layout.
        tiling: how a program works; ``None`` for the tuned one.
        multiprocessors: of the device; ``None`` asks it.
        device: where the scratch memory lies.
    """

    def __init__(
        self,
        batch: int,
        queries: int,
        heads: int,
        layout: LatentLayout,
        tiling: DecodeTiling | None = None,
        multiprocessors: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        self.rows = queries * heads
        self.tiling = tiling or default_tiling(layout, self.rows)
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.row_blocks = triton.cdiv(self.rows, self.tiling.block_rows)
        self.parts = max(multiprocessors * self.tiling.programs_per_sm // self.row_blocks, 1)
        slots = 2 * self.parts
        self.part_P2 = torch.zeros(self.parts + 1, 2, dtype=torch.int32, device=device)
        self.split_B2 = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        # Of FP8 rows in BF16, as the output: half as much to write and to read again.
        dtype = torch.bfloat16 if self.tiling.hopper else torch.float32
        self.partial_SML = torch.empty(
            slots, self.rows, layout.latent_width, dtype=dtype, device=device
        )
        self.partial_lse_SM = torch.empty(slots, self.rows, device=device)

    def of_batch(self, requests: int) -> DecodeWorkspace:
        """The same scratch memory for the first ``requests`` of the batch."""
        part = copy.copy(self)
        part.split_B2 = self.split_B2[:requests]
        return part

    def schedule(self, length_B: torch.Tensor) -> None:
        """Divide the batch among parts, on the device."""
        decode_schedule(
            length_B,
            self.part_P2,
            self.split_B2,
            self.tiling.block_tokens,
            self.tiling.min_tiles,
        )
