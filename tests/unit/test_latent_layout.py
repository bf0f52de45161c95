"""Rows have the documented bytes, and plans divide the latent without gap or overlap."""

from __future__ import annotations

import pytest

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import (
    CacheLayout,
    KVFormat,
    LatentLayout,
    ModelPlan,
    RankShard,
    ShardPlan,
    describe_core,
)


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


@pytest.mark.parametrize("layers", [1, 61])
def test_a_uniform_cache_is_one_run_of_the_layers_row(layers: int) -> None:
    plan = ModelPlan.uniform(ShardPlan(512, 2), layers)
    cache = CacheLayout(plan, 1, 64, KVFormat.FP8)
    row = LatentLayout(ShardPlan(512, 2), 1, 64, KVFormat.FP8)
    assert plan.is_uniform and plan.core == 0 and plan.latent_share == 0.5
    assert cache.layers == (row,) * layers
    assert cache.token_bytes == 388 * layers
    ((run, part),) = cache.parts(7)
    assert run.layout == row and run.layers == tuple(range(layers))
    assert run.shape(7) == (layers, 7, 388) and part == slice(0, layers * 7 * 388)


def test_layers_of_one_width_travel_together_in_the_order_of_their_first() -> None:
    plan = ModelPlan(512, 2, (32, 0, 32, 64, 0))
    cache = CacheLayout(plan, 0, 64, KVFormat.FP8)
    assert [run.layers for run in cache.runs] == [(0, 2), (1, 4), (3,)]
    assert [run.layout.row_bytes for run in cache.runs] == [404, 388, 420]
    assert cache.token_bytes == 2 * 404 + 2 * 388 + 420
    parts = cache.parts(3)
    assert [part.start for _, part in parts] == [0, *(part.stop for _, part in parts[:-1])]
    assert [part.stop - part.start for _, part in parts] == [3 * 808, 3 * 776, 3 * 420]
    assert describe_core(plan.core_dims) == "0..64" and plan.core == [32, 0, 32, 64, 0]
    assert plan.latent_share == pytest.approx((272 + 256 + 272 + 288 + 256) / 5 / 512)


def test_a_pipeline_stage_has_the_plans_of_its_own_layers() -> None:
    plan = ModelPlan(512, 2, (32, 0, 64, 0))
    assert plan.part(1, 3) == ModelPlan(512, 2, (0, 64))
    assert [plan.layer(index).core_dims for index in range(4)] == [32, 0, 64, 0]


def test_a_cache_layout_survives_the_wire() -> None:
    cache = CacheLayout(ModelPlan(512, 4, (64, 0, 128)), 3, 64, KVFormat.FP8, 16)
    sent = {**cache.to_dict(), "plan": {**cache.to_dict()["plan"], "core_dims": [64, 0, 128]}}
    assert CacheLayout.from_dict(sent) == CacheLayout.from_dict(cache.to_dict()) == cache


@pytest.mark.parametrize("missing", ["plan", "group", "kv_format", "qk_rope_head_dim"])
def test_a_damaged_layout_is_refused(missing: str) -> None:
    values = CacheLayout(ModelPlan(512, 4, (0,)), 0, 64, KVFormat.FP8).to_dict()
    del values[missing]
    with pytest.raises(ConfigError, match="not a cache layout"):
        CacheLayout.from_dict(values)


@pytest.mark.parametrize("plan", [{"core_dims": 0}, {"core_dims": [0], "width": 1}])
def test_a_damaged_plan_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not a plan of a model"):
        ModelPlan.from_dict({"kv_lora_rank": 512, "groups": 2, **plan})


@pytest.mark.parametrize(
    ("core_dims", "remedy"), [((), "one number for each"), ((0, 511), "change core_dims")]
)
def test_impossible_plans_of_a_model_say_what_would_do(
    core_dims: tuple[int, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ModelPlan(512, 2, core_dims)


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


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"group": 2}, "not in 0..1"),
        ({"group": -1}, "not in 0..1"),
        ({"qk_rope_head_dim": 0}, "at least 1"),
        ({"row_align": 2}, "power of two >= 4"),
        ({"row_align": 24}, "power of two >= 4"),
    ],
)
def test_impossible_rows_say_what_would_do(values: dict[str, int], remedy: str) -> None:
    row = {"group": 1, "qk_rope_head_dim": 64, "kv_format": KVFormat.FP8, **values}
    with pytest.raises(ConfigError, match=remedy):
        LatentLayout(ShardPlan(512, 2), **row)  # type: ignore[arg-type]


def test_tp_must_be_a_multiple_of_groups() -> None:
    with pytest.raises(ConfigError, match="--tp-size or --groups"):
        RankShard(0, 3, 2)
