"""Where every byte of a cached latent row lies, on every rank.

A token of one layer is cached as one *row*: its latent (the rank's part of it), the RoPE key, and
a scale when the latent is FP8. The kernels take their offsets from :class:`LatentLayout`, one
layer's row; pool and wire from :class:`CacheLayout`, all layers' rows. They are computed nowhere
else.

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

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
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


class PVFormat(str, Enum):
    """What decode rounds FP8 rows and their weights to where it adds them up (P V)."""

    FP16 = "fp16"
    """Values exactly, weights to 11 bits."""
    FP8 = "fp8"
    """Values as they are stored, weights times token scales to 4 bits, each 64 tokens with a scale
    of their own (SnapMLA); faster on Hopper."""


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
class ModelPlan:
    """A :class:`ShardPlan` for every layer, which differ in ``core_dims`` alone.

    Attributes:
        kv_lora_rank: width of the whole latent.
        groups: latent groups.
        core_dims: of each layer, leading dims that every group keeps.

    Raises:
        ConfigError: no layers, or a layer's latent cannot be divided so.
    """

    kv_lora_rank: int
    groups: int
    core_dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.core_dims:
            raise ConfigError("core_dims=() names no layer; give one number for each")
        for core_dims in set(self.core_dims):
            ShardPlan(self.kv_lora_rank, self.groups, core_dims)

    @classmethod
    def uniform(cls, plan: ShardPlan, layers: int) -> ModelPlan:
        """The same plan for each of ``layers``."""
        return cls(plan.kv_lora_rank, plan.groups, (plan.core_dims,) * layers)

    @property
    def num_layers(self) -> int:
        """Layers that the plan is for."""
        return len(self.core_dims)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are divided alike."""
        return len(set(self.core_dims)) == 1

    @property
    def latent_share(self) -> float:
        """Share of the latent that one rank stores, mean over the layers."""
        widths = [self.layer(index).latent_width for index in range(self.num_layers)]
        return sum(widths) / (self.num_layers * self.kv_lora_rank)

    def layer(self, index: int) -> ShardPlan:
        """Plan of one layer, counted from 0."""
        return ShardPlan(self.kv_lora_rank, self.groups, self.core_dims[index])

    def part(self, start: int, stop: int) -> ModelPlan:
        """Plan of the layers ``[start, stop)`` alone, one pipeline stage's."""
        return ModelPlan(self.kv_lora_rank, self.groups, self.core_dims[start:stop])

    @property
    def core(self) -> int | list[int]:
        """Core dims for results: one number where layers are alike, else one for each."""
        return self.core_dims[0] if self.is_uniform else list(self.core_dims)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelPlan:
        """Rebuild a plan from plain values, ``core_dims`` as a list.

        Raises:
            ConfigError: a field is missing, unknown or out of range.
        """
        try:
            return cls(**{**values, "core_dims": tuple(values["core_dims"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a plan of a model: {values!r} ({error})") from error


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


@dataclass(frozen=True)
class LayerRun:
    """Layers of one cache whose rows are alike, and which travel as one array.

    Attributes:
        layout: their rows.
        layers: their indices, ascending, counted from the cache's first layer.
    """

    layout: LatentLayout
    layers: tuple[int, ...]

    def shape(self, tokens: int) -> tuple[int, int, int]:
        """``[layers, tokens, row_bytes]`` of the run's part of a payload."""
        return len(self.layers), tokens, self.layout.row_bytes


@dataclass(frozen=True)
class CacheLayout:
    """Bytes of every layer's rows on one rank, for pool and wire alike.

    On the wire the rows of some tokens are the runs' arrays one behind another, each
    ``[layers of the run, tokens, row_bytes of the run]``, without gaps.

    Attributes:
        plan: division of the latent, layer by layer.
        group: this rank's latent group.
        qk_rope_head_dim: RoPE dims, replicated on every rank.
        kv_format: storage format.
        row_align: rows are padded to a multiple of this many bytes.

    Raises:
        ConfigError: as :class:`LatentLayout`.
    """

    plan: ModelPlan
    group: int
    qk_rope_head_dim: int
    kv_format: KVFormat
    row_align: int = 4

    def __post_init__(self) -> None:
        assert self.layers  # makes them, which checks every field

    @cached_property
    def layers(self) -> tuple[LatentLayout, ...]:
        """Row layout of each layer."""
        common = self.group, self.qk_rope_head_dim, self.kv_format, self.row_align
        plans = [self.plan.layer(index) for index in range(self.plan.num_layers)]
        return tuple(LatentLayout(plan, *common) for plan in plans)

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        """Distinct row layouts in the order of their first layer, each with its layers."""
        found: dict[LatentLayout, list[int]] = {}
        for index, layout in enumerate(self.layers):
            found.setdefault(layout, []).append(index)
        return tuple(LayerRun(layout, tuple(layers)) for layout, layers in found.items())

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return sum(layout.row_bytes for layout in self.layers)

    def parts(self, tokens: int) -> list[tuple[LayerRun, slice]]:
        """Each run with the bytes that its rows of ``tokens`` take of a payload."""
        found, start = [], 0
        for run in self.runs:
            stop = start + len(run.layers) * tokens * run.layout.row_bytes
            found.append((run, slice(start, stop)))
            start = stop
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire; :meth:`from_dict` is the inverse."""
        return {**asdict(self), "kv_format": self.kv_format.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CacheLayout:
        """Rebuild a layout that :meth:`to_dict` wrote.

        Raises:
            ConfigError: a field is missing, unknown or out of range.
        """
        try:
            plan = ModelPlan.from_dict(values["plan"])
            return cls(**{**values, "plan": plan, "kv_format": KVFormat(values["kv_format"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a cache layout: {values!r} ({error})") from error


def describe_core(core_dims: int | Sequence[int]) -> str:
    """Core dims of a model for people: ``32``, or ``0..64`` where layers differ."""
    if isinstance(core_dims, int):
        return str(core_dims)
    low, high = min(core_dims), max(core_dims)
    return str(low) if low == high else f"{low}..{high}"


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
