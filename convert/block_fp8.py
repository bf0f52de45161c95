"""DeepSeek-V3's block-FP8 weights: float8_e4m3fn values, one float32 scale for each block.

``weight = values * scale`` with the scale of the block that an element lies in; the checkpoint
calls it ``weight_scale_inv``. Blocks are 128 x 128; those at the right and lower edges are cut.

Shape suffixes: O output rows, I input columns, P block rows, S block columns.
Source: DeepSeek-V3 technical report, section 3.3; ``quantization_config`` in its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpla.core.errors import CheckpointError
from tpla.core.latent_layout import AMAX_FLOOR, FP8_MAX

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class BlockFP8:
    """Block format of a checkpoint.

    Attributes:
        rows: rows of a block.
        columns: columns of a block.
        power_of_two: scales are powers of two (``scale_fmt: ue8m0``, as in DeepSeek-V3.1).
    """

    rows: int
    columns: int
    power_of_two: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BlockFP8 | None:
        """The block format that config.json declares, None for an unquantised checkpoint.

        Raises:
            CheckpointError: another quantisation than block FP8.
        """
        quantization = config.get("quantization_config")
        if not quantization:
            return None
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        if method != "fp8" or not block:
            raise CheckpointError(
                f"quantization_config has quant_method={method!r}, weight_block_size={block!r}; "
                "only unquantised and block-FP8 checkpoints convert: start from one of those"
            )
        return cls(int(block[0]), int(block[1]), quantization.get("scale_fmt") == "ue8m0")

    def dequantize(self, values_OI: torch.Tensor, scale_PS: torch.Tensor) -> torch.Tensor:
        """Weights ``[O, I]`` float32.

        Raises:
            CheckpointError: the scales do not match the weight's shape.
        """
        expected = (-(-values_OI.shape[0] // self.rows), -(-values_OI.shape[1] // self.columns))
        if tuple(scale_PS.shape) != expected:
            raise CheckpointError(
                f"weight of shape {tuple(values_OI.shape)} has block scales of shape "
                f"{tuple(scale_PS.shape)}, expected {expected}; download the checkpoint again"
            )
        return values_OI.float() * self._spread(scale_PS.float(), values_OI.shape)

    def quantize(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values ``[O, I]`` float8_e4m3fn and scales ``[P, S]`` float32, ``scale = amax / 448``."""
        outputs, inputs = weight_OI.shape
        padding = (0, -inputs % self.columns, 0, -outputs % self.rows)
        scale_rows = -(-outputs // self.rows)
        padded = torch.nn.functional.pad(weight_OI.float(), padding)
        blocks = padded.view(scale_rows, self.rows, -1, self.columns)
        scale_PS = blocks.abs().amax((1, 3)).clamp_min(AMAX_FLOOR) / FP8_MAX
        if self.power_of_two:
            scale_PS = torch.exp2(torch.ceil(torch.log2(scale_PS)))
        values = weight_OI.float() / self._spread(scale_PS, weight_OI.shape)
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_PS

    def _spread(self, scale_PS: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        tall = scale_PS.repeat_interleave(self.rows, 0)[: shape[0]]
        return tall.repeat_interleave(self.columns, 1)[:, : shape[1]]
