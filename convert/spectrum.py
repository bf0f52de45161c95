"""The latent's energy along each rotated dim, layer by layer, apart from the checkpoint.

A converted checkpoint holds it in its manifest. ``tpla eval spectrum --json`` keeps it for reports
on models that are not kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from tpla.core.checkpoint import Manifest
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import ModelPlan

_DIGITS = 4
"""Significant digits in a file."""


@dataclass(frozen=True)
class Spectrum:
    """Where the latents of a model have their energy.

    Attributes:
        plan: how decode divides them.
        method: the rotation.
        shares: ``[layer][dim]``, fraction of the layer's energy.
    """

    plan: ModelPlan
    method: str
    shares: list[list[float]]

    @classmethod
    def of(cls, manifest: Manifest) -> Spectrum:
        """What a converted checkpoint says."""
        return cls(manifest.plan, manifest.method, manifest.spectrum)

    @classmethod
    def load(cls, path: Path) -> Spectrum:
        """Read what :meth:`to_dict` gave.

        Raises:
            ConfigError: the file does not hold it.
        """
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "plan": ModelPlan.from_dict(values["plan"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} holds no result of tpla eval spectrum ({error}); write it again"
            ) from error

    def to_dict(self) -> dict[str, object]:
        """Plain values, shares to four digits."""
        shares = [[float(f"{share:.{_DIGITS}g}") for share in layer] for layer in self.shares]
        return {**asdict(self), "shares": shares}

    def dims_for(self, layer: int, energy: float) -> int:
        """Fewest leading dims of ``layer`` that hold this fraction of its energy."""
        sums = accumulate(self.shares[layer])
        enough = (dims for dims, total in enumerate(sums, 1) if total >= energy)
        return next(enough, self.plan.kv_lora_rank)

    def stored(self, layer: int) -> float:
        """Fraction of ``layer``'s energy in what the rank with the leading slice stores."""
        return sum(self.shares[layer][: self.plan.layer(layer).latent_width])
