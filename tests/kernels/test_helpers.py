"""The kernels around decode attention, at sizes the Triton interpreter can bear.

Runs under ``TRITON_INTERPRET=1`` (see test_interpreter.py) or on a GPU.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from tests.kernels.decode_cases import DEVICE
from tests.kernels.helper_cases import (
    BF16,
    FP8,
    AppendCase,
    PageCase,
    QueryCase,
    build_pools,
    check_append,
    check_migration,
    check_queries,
    check_reference_rotation,
    gather,
    pointers,
    poisoned,
)
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, LatentLayout, ShardPlan
from tpla.kernels.append_latents import append_latents
from tpla.kernels.fetch_latents import fetch_latents
from tpla.kernels.gather_pages import gather_pages
from tpla.kernels.prepare_queries import prepare_queries
from tpla.kernels.scatter_pages import scatter_pages

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreter.py", allow_module_level=True)

QUERIES = [
    QueryCase(5),
    QueryCase(0),
    QueryCase(1, heads=1, width=512, rope=64, nope=128),
    QueryCase(17, width=264, nope=48),
    QueryCase(70, heads=1),
    QueryCase(200, heads=2),
    QueryCase(321, heads=1, quantized=False),
    QueryCase(5, width=272, quantized=False),
    QueryCase(5, interleaved=False),
    QueryCase(5, rotated=False),
    QueryCase(5, dtype=torch.float32, rope=16),
    QueryCase(5, strided_weight=True),
]
APPENDS = [
    AppendCase(5),
    AppendCase(0),
    AppendCase(7, skipped=3),
    AppendCase(3, skipped=3),
    AppendCase(5, width=264, core=16, rope=64),
    AppendCase(5, width=272, core=32, group=0),
    AppendCase(5, width=512, groups=1, group=0, rope=64),
    AppendCase(5, width=66, core=2, groups=4, group=3, row_align=4),
    AppendCase(5, kv_format=BF16, row_align=4),
    AppendCase(5, kv_format=BF16, width=27, row_align=64),
    AppendCase(5, width=27, row_align=64),
    AppendCase(5, gamma=False, rotated=False, strided=False),
    AppendCase(5, interleaved=False, position_dtype=torch.int32),
    AppendCase(5, dtype=torch.float32),
]
MIGRATIONS = [
    PageCase(),
    PageCase(pages=0),
    PageCase(pages=7, page_size=1, page_dtype=torch.int64),
    PageCase(pages=1, page_size=64, layers=1),
    PageCase(width=264, core=16, rope=64, layers=2),
    PageCase(width=272, core=32, group=0, row_align=4),
    PageCase(width=512, groups=1, group=0, rope=64, layers=1),
    PageCase(kv_format=BF16),
    PageCase(kv_format=BF16, width=27, row_align=64, rope=16, dtype=torch.float32),
    PageCase(width=66, core=2, groups=4, group=2, rope=16, row_align=4),
]


@pytest.mark.parametrize("case", QUERIES, ids=str)
def test_queries_match(case: QueryCase) -> None:
    check_queries(case)


@pytest.mark.parametrize("case", APPENDS, ids=str)
def test_appended_rows_match(case: AppendCase) -> None:
    check_append(case)


@pytest.mark.parametrize("case", MIGRATIONS, ids=str)
def test_migrated_rows_match(case: PageCase) -> None:
    check_migration(case)


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_rotates(interleaved: bool) -> None:
    check_reference_rotation(interleaved)


@pytest.mark.parametrize("kv_format", [BF16, FP8])
def test_a_zero_latent_keeps_its_rope_key(kv_format: KVFormat) -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, kv_format)
    rows = poisoned(1, layout.row_bytes)
    rope = torch.linspace(-3, 3, 16, device=DEVICE)[None]
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    zero = torch.zeros(1, 32, device=DEVICE)
    append_latents(zero, rope, None, 1e-6, None, None, slot, layout, rows)
    out = poisoned(1, 48, dtype=torch.bfloat16)
    fetch_latents(rows, slot, layout, out[:, :32], out[:, 32:])
    assert not out[:, :32].any()
    torch.testing.assert_close(out[:, 32:].float(), rope, atol=0, rtol=2**-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("kv_format", [BF16, FP8])
def test_a_broken_latent_is_not_hidden(kv_format: KVFormat) -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, kv_format)
    pool = torch.randn(2, 48, device=DEVICE)
    pool[0, 5], pool[1, 6] = math.nan, math.inf
    page = torch.arange(2, device=DEVICE)
    staging = poisoned(1, 2, layout.row_bytes)
    gather_pages(pointers([pool]), torch.float32, page, 1, layout, staging)
    out = poisoned(2, 48, dtype=torch.bfloat16)
    fetch_latents(staging[0], page, layout, out[:, :32], out[:, 32:])
    assert not torch.isfinite(out[0, 5]) and not torch.isfinite(out[1, 6])


def test_both_groups_together_hold_the_latent() -> None:
    case = PageCase(width=40, core=8, kv_format=BF16, group=0)
    pools = build_pools(case)
    parts = [
        gather(replace(pools, case=replace(case, group=group)), gather_pages)[..., :80]
        for group in (0, 1)
    ]
    assert torch.equal(parts[0][..., :16], parts[1][..., :16])  # the core, in bytes
    whole = torch.cat([parts[0], parts[1][..., 16:]], -1).view(torch.bfloat16)
    slot = pools.pages_N.long()[:, None] * 4 + torch.arange(4, device=DEVICE)
    for layer, pool in enumerate(pools.pools):
        assert torch.equal(whole[layer], pool[slot.flatten(), :72])


def test_bad_arguments_are_refused() -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, FP8)
    rows, slot = poisoned(4, layout.row_bytes), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    latent, rope = torch.zeros(1, 32, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
    with pytest.raises(ConfigError, match="fp32"):
        fp32 = replace(layout, kv_format=KVFormat.FP32)
        append_latents(latent, rope, None, 1e-6, None, None, slot, fp32, rows)
    with pytest.raises(ConfigError, match="qk_rope_head_dim=8"):
        narrow = replace(layout, qk_rope_head_dim=8)
        append_latents(latent, rope, None, 1e-6, None, None, slot, narrow, rows)
    with pytest.raises(ValueError, match="slot must be contiguous"):
        append_latents(latent, rope, None, 1e-6, None, None, slot.int(), layout, rows)
    with pytest.raises(ValueError, match="pass both, or neither"):
        append_latents(latent, rope, None, 1e-6, slot, None, slot, layout, rows)
    with pytest.raises(ValueError, match="latent must be contiguous in its last dim"):
        append_latents(latent[:, :16], rope, None, 1e-6, None, None, slot, layout, rows)
    with pytest.raises(ValueError, match="gather_pages reads"):
        gather_pages(slot, torch.float16, slot, 1, layout, rows[None, :1])
    q = torch.zeros(1, 1, 48, device=DEVICE)
    with pytest.raises(ValueError, match="w_kc must be"):
        weight = torch.zeros(1, 32, 32, dtype=torch.bfloat16, device=DEVICE)
        prepare_queries(q[..., :32], q[..., 32:], weight, None, None, q[..., :32], None, q)


@pytest.mark.parametrize(
    ("name", "words"), [("layout", "fp32"), ("pages", "pages must"), ("staging", "staging must")]
)
def test_pages_that_cannot_be_moved_are_refused(name: str, words: str) -> None:
    layout = LatentLayout(ShardPlan(32), 0, 16, FP8)
    pages = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    other = {
        "layout": replace(layout, kv_format=KVFormat.FP32),
        "pages": pages.float(),
        "staging": poisoned(1, 4, layout.row_bytes),
    }
    given = {"layout": layout, "pages": pages, "staging": poisoned(1, 1, layout.row_bytes)}
    given[name] = other[name]
    pool = pointers([poisoned(48, dtype=torch.bfloat16)])
    with pytest.raises((ConfigError, ValueError), match=words):
        gather_pages(pool, torch.bfloat16, given["pages"], 1, given["layout"], given["staging"])
    with pytest.raises((ConfigError, ValueError), match=words):
        scatter_pages(given["staging"], pool, given["pages"], 1, given["layout"])
