"""Where every byte of a cached latent row lies, on every rank.

A token of one layer is cached as one *row*: its latent (the rank's part of it), the RoPE key, and
a scale when the latent is FP8. The pool, the wire and the kernels all take their offsets from
:class:`LatentLayout`; they are computed nowhere else.

===========  ==================  ===================  =========  ==========================
format       latent              RoPE key             scale      bytes (latent r, RoPE d)
===========  ==================  ===================  =========  ==========================
``fp32``     r x float32         d x float32          none       4 r + 4 d
``bf16``     r x bfloat16        d x bfloat16         none       2 r + 2 d
``fp8``      r x float8_e4m3fn   d x bfloat16, k / s  1 float32  pad4(r) + pad4(2 d) + 4
===========  ==================  ===================  =========  ==========================

The scale comes last: Hopper's bulk copies begin at multiples of 16 bytes, which the RoPE key then
does for every latent of 16 r dims.

In ``fp8`` the RoPE key is stored divided by the token's scale s (SnapMLA, scale domain alignment),
so that one multiplication by s restores the latent's and the RoPE's share of a logit together.

DeepSeek-V3 (r = 512, d = 64): MLA bf16 1152 B; SnapMLA fp8 644 B; TPLA fp8 with two groups 388 B.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from tpla.core.errors import ConfigError

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

AMAX_FLOOR = 1e-12
"""Smallest per-token maximum that a scale is derived from; keeps k / s finite for a zero latent."""

CORE_VALUE_GROUP = 0
"""The group whose rank counts the values of the shared core dims; the all-reduce sums groups."""

_SCALE_BYTES = 4


class KVFormat(str, Enum):
    """Storage format of a latent row."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def latent_itemsize(self) -> int:
        """Bytes of one latent element."""
        return {"fp32": 4, "bf16": 2, "fp8": 1}[self.value]

    @property
    def rope_itemsize(self) -> int:
        """Bytes of one RoPE element."""
        return 4 if self is KVFormat.FP32 else 2


@dataclass(frozen=True)
class ShardPlan:
    """How the rotated latent is divided among ``groups``.

    The leading ``core_dims`` principal dims are replicated on every group, as the RoPE key is; the
    rest is cut into ``groups`` contiguous slices of equal width.

    Raises:
        ConfigError: the latent cannot be divided so.
    """

    kv_lora_rank: int
    groups: int = 1
    core_dims: int = 0

    def __post_init__(self) -> None:
        if self.kv_lora_rank < 1 or self.groups < 1 or self.core_dims < 0:
            raise ConfigError(
                f"shard plan {self} is out of range; "
                "kv_lora_rank and groups start at 1, core_dims at 0"
            )
        if self.groups == 1 and self.core_dims:
            raise ConfigError(
                f"core_dims={self.core_dims} with one group; a shared core needs groups >= 2, "
                "use core_dims=0"
            )
        rest = self.kv_lora_rank - self.core_dims
        if rest < self.groups or rest % self.groups:
            raise ConfigError(
                f"kv_lora_rank={self.kv_lora_rank} less core_dims={self.core_dims} leaves {rest} "
                f"dims, which {self.groups} groups cannot share equally; change core_dims by "
                f"{rest % self.groups} or choose other groups"
            )

    @property
    def slice_width(self) -> int:
        """Latent dims that belong to one group alone."""
        return (self.kv_lora_rank - self.core_dims) // self.groups

    @property
    def latent_width(self) -> int:
        """Latent dims that one rank stores: the shared core and its slice."""
        return self.core_dims + self.slice_width

    def slice_bounds(self, group: int) -> tuple[int, int]:
        """First and one-past-last latent dim of ``group``'s own slice."""
        if not 0 <= group < self.groups:
            raise ConfigError(f"group {group} is not in 0..{self.groups - 1}")
        start = self.core_dims + group * self.slice_width
        return start, start + self.slice_width


@dataclass(frozen=True)
class RankShard:
    """What one attention-TP rank holds: a latent group and a shard of the heads.

    The group varies fastest: ranks 0..g-1 hold the same heads and different slices.

    Raises:
        ConfigError: ``tp_size`` is not a multiple of ``groups``.
    """

    tp_rank: int
    tp_size: int
    groups: int

    def __post_init__(self) -> None:
        if self.tp_size % self.groups:
            raise ConfigError(
                f"attention TP size {self.tp_size} is not a multiple of {self.groups} latent "
                "groups; change --tp-size or --groups"
            )

    @property
    def group(self) -> int:
        """Latent group of this rank."""
        return self.tp_rank % self.groups

    @property
    def head_rank(self) -> int:
        """Index of this rank's head shard."""
        return self.tp_rank // self.groups

    @property
    def head_shards(self) -> int:
        """Number of head shards."""
        return self.tp_size // self.groups


@dataclass(frozen=True)
class LatentLayout:
    """Bytes of one latent row on one rank, for pool, wire and kernels alike.

    Attributes:
        plan: division of the latent.
        group: this rank's latent group.
        qk_rope_head_dim: RoPE dims, replicated on every rank.
        kv_format: storage format.
        row_align: the row is padded to a multiple of this many bytes.
    """

    plan: ShardPlan
    group: int
    qk_rope_head_dim: int
    kv_format: KVFormat
    row_align: int = 4

    def __post_init__(self) -> None:
        self.plan.slice_bounds(self.group)
        if self.qk_rope_head_dim < 1:
            raise ConfigError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be at least 1")
        if self.row_align < 4 or self.row_align & (self.row_align - 1):
            raise ConfigError(f"row_align={self.row_align} must be a power of two >= 4")

    @property
    def latent_width(self) -> int:
        """Latent elements in the row."""
        return self.plan.latent_width

    @property
    def latent_bytes(self) -> int:
        """Bytes of the latent part, padding excluded."""
        return self.latent_width * self.kv_format.latent_itemsize

    @property
    def has_scale(self) -> bool:
        """Whether the row carries a per-token scale."""
        return self.kv_format is KVFormat.FP8

    @property
    def rope_offset(self) -> int:
        """Byte offset of the RoPE key."""
        return _round_up(self.latent_bytes, 4)

    @property
    def rope_bytes(self) -> int:
        """Bytes of the RoPE key."""
        return self.qk_rope_head_dim * self.kv_format.rope_itemsize

    @property
    def scale_offset(self) -> int:
        """Byte offset of the float32 scale (meaningful when :attr:`has_scale`)."""
        return _round_up(self.rope_offset + self.rope_bytes, _SCALE_BYTES)

    @property
    def used_bytes(self) -> int:
        """Bytes of a row that hold something, :attr:`row_align` excluded."""
        return self.scale_offset + (_SCALE_BYTES if self.has_scale else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return _round_up(self.used_bytes, self.row_align)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire; :meth:`from_dict` is the inverse."""
        return {**asdict(self), "kv_format": self.kv_format.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LatentLayout:
        """Rebuild a layout that :meth:`to_dict` wrote.

        Raises:
            ConfigError: a field is missing, unknown or out of range.
        """
        try:
            plan = ShardPlan(**values["plan"])
            rest = {name: value for name, value in values.items() if name != "plan"}
            rest["kv_format"] = KVFormat(rest["kv_format"])
            return cls(plan=plan, **rest)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a latent layout: {values!r} ({error})") from error


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
