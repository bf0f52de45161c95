"""Rows have the documented bytes, and plans divide the latent without gap or overlap."""

from __future__ import annotations

import pytest

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, LatentLayout, RankShard, ShardPlan


@pytest.mark.parametrize(
    ("groups", "kv_format", "row_bytes"),
    [
        (1, KVFormat.BF16, 1152),
        (1, KVFormat.FP8, 644),
        (2, KVFormat.FP8, 388),
        (2, KVFormat.BF16, 640),
        (4, KVFormat.FP8, 260),
    ],
)
def test_deepseek_v3_rows_have_the_published_sizes(
    groups: int, kv_format: KVFormat, row_bytes: int
) -> None:
    assert LatentLayout(ShardPlan(512, groups), 0, 64, kv_format).row_bytes == row_bytes


@pytest.mark.parametrize("core_dims", [0, 16, 64])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_core_and_slices_cover_the_latent_once(groups: int, core_dims: int) -> None:
    plan = ShardPlan(512, groups, core_dims)
    covered = list(range(core_dims))
    for group in range(groups):
        covered += range(*plan.slice_bounds(group))
    assert covered == list(range(512))


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("width", [8, 26, 33])
def test_fields_do_not_overlap_and_are_aligned(width: int, kv_format: KVFormat) -> None:
    layout = LatentLayout(ShardPlan(width), 0, 6, kv_format, row_align=16)
    assert layout.latent_bytes <= layout.rope_offset
    assert layout.rope_offset + layout.rope_bytes <= layout.scale_offset
    assert layout.rope_offset % 4 == layout.scale_offset % 4 == 0
    assert layout.used_bytes == layout.scale_offset + (4 if layout.has_scale else 0)
    assert layout.used_bytes <= layout.row_bytes and layout.row_bytes % 16 == 0


@pytest.mark.parametrize(("groups", "core_dims"), [(1, 0), (2, 0), (2, 32), (4, 0), (4, 64)])
def test_parts_of_a_row_begin_where_bulk_copies_can(groups: int, core_dims: int) -> None:
    plan = ShardPlan(512, groups, core_dims)
    layout = LatentLayout(plan, 0, 64, KVFormat.FP8, row_align=16)
    assert layout.rope_offset % 16 == layout.scale_offset % 16 == layout.row_bytes % 16 == 0


def test_a_layout_survives_the_wire() -> None:
    layout = LatentLayout(ShardPlan(512, 4, 64), 3, 64, KVFormat.FP8)
    assert LatentLayout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize("missing", ["plan", "group", "kv_format", "qk_rope_head_dim"])
def test_a_damaged_layout_is_refused(missing: str) -> None:
    values = LatentLayout(ShardPlan(512, 4), 0, 64, KVFormat.FP8).to_dict()
    del values[missing]
    with pytest.raises(ConfigError, match="not a latent layout"):
        LatentLayout.from_dict(values)


def test_ranks_of_one_head_shard_hold_different_groups() -> None:
    shards = [RankShard(rank, 4, 2) for rank in range(4)]
    assert [(s.head_rank, s.group) for s in shards] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert shards[0].head_shards == 2


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((512, 3), "groups"),
        ((512, 2, 511), "core_dims"),
        ((512, 1, 16), "groups >= 2"),
        ((0, 1), "start at 1"),
        ((512, 2, -1), "start at 1"),
    ],
)
def test_impossible_plans_say_what_would_do(arguments: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ShardPlan(*arguments)


def test_tp_must_be_a_multiple_of_groups() -> None:
    with pytest.raises(ConfigError, match="--tp-size or --groups"):
        RankShard(0, 3, 2)
