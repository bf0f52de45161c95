"""The kernels around decode attention at serving sizes on the GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.kernels.helper_cases import (
    BF16,
    AppendCase,
    PageCase,
    QueryCase,
    build_pools,
    check_append,
    check_migration,
    check_queries,
    gather,
    pointers,
    poisoned,
)
from tpla.core.latent_layout import LatentLayout, ShardPlan
from tpla.kernels.append_latents import append_latents
from tpla.kernels.fetch_latents import fetch_latents
from tpla.kernels.gather_pages import gather_pages
from tpla.kernels.scatter_pages import scatter_pages

pytestmark = pytest.mark.gpu


def queries(tokens: int, heads: int = 128, **changes: object) -> QueryCase:
    given = {"nope": 128, "width": 256, "rope": 64, **changes}
    return QueryCase(tokens, heads, **given)  # type: ignore[arg-type]


def appends(tokens: int, **changes: object) -> AppendCase:
    return AppendCase(tokens, **{"width": 256, "rope": 64, **changes})  # type: ignore[arg-type]


def pages(count: int, **changes: object) -> PageCase:
    given = {"width": 256, "rope": 64, "page_size": 64, "layers": 4, **changes}
    return PageCase(pages=count, **given)  # type: ignore[arg-type]


QUERIES = [
    *[queries(tokens) for tokens in (1, 16, 31, 64, 65, 257, 512, 2048)],
    *[queries(64, heads) for heads in (1, 10, 16, 64)],
    *[queries(64, width=width) for width in (64, 264, 272, 512)],
    queries(512, 64),
    queries(300, width=224),
    queries(64, quantized=False),
    queries(64, 16, width=512, quantized=False),
    queries(64, rotated=False),
    queries(64, interleaved=False),
    queries(64, rope=32),
    queries(64, nope=192),
    queries(33, 16, dtype=torch.float32),
    queries(33, 16, width=512, dtype=torch.float32),
    queries(64, 16, strided_weight=True),
]
APPENDS = [
    *[appends(tokens) for tokens in (1, 63, 64, 512, 8192)],
    appends(512, skipped=100),
    appends(512, group=0),
    appends(512, width=512, groups=1, group=0),
    appends(512, width=264, core=16),
    appends(512, width=272, core=32, row_align=4),
    appends(512, width=64, groups=8, group=5),
    appends(512, kv_format=BF16),
    appends(512, kv_format=BF16, width=272, core=32),
    appends(512, row_align=4),
    appends(512, interleaved=False, rope=32),
    appends(512, rotated=False, gamma=False, strided=False),
    appends(512, dtype=torch.float32),
]
MIGRATIONS = [
    pages(64),
    pages(64, group=0),
    pages(1000, page_size=1),
    pages(33, page_size=16),
    pages(33, row_align=4),
    pages(33, page_size=1, row_align=4),
    pages(33, width=512, groups=1, group=0),
    pages(33, width=264, core=16),
    pages(33, width=272, core=32, row_align=4),
    pages(33, width=64, groups=8, group=5),
    pages(33, kv_format=BF16),
    pages(33, dtype=torch.float32),
    pages(5, layers=61),
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


def test_rows_beyond_two_gigabytes_are_reached() -> None:
    layout = LatentLayout(ShardPlan(512, 2), 1, 64, BF16, row_align=16)
    slots = 2**32 // layout.row_bytes + 64
    rows = torch.empty(slots, layout.row_bytes, dtype=torch.uint8, device="cuda")
    slot = torch.tensor([0, slots - 64, slots - 1], device="cuda")
    latent = torch.randn(3, 512, device="cuda")
    rope = torch.randn(3, 64, device="cuda").bfloat16()
    append_latents(latent, rope, None, 1e-6, None, None, slot, layout, rows)
    near = poisoned(3, 256, dtype=torch.bfloat16), poisoned(3, 64, dtype=torch.bfloat16)
    fetch_latents(rows, slot, layout, *near)
    assert torch.equal(near[1], rope)
    page = torch.tensor([slots // 64 - 1], device="cuda")
    staging = rows[:64].clone()[None]
    scatter_pages(staging, pointers([rows]), page, 64, layout)
    first = (slots // 64 - 1) * 64
    assert torch.equal(rows[first : first + 64], staging[0])


def test_a_graph_follows_its_inputs() -> None:
    """Captured once, gather and scatter read pages and pointers anew at each replay."""
    case = pages(8)
    pools = build_pools(case)
    expected = gather(pools, gather_pages)
    pages_N = torch.arange(8, dtype=torch.int32, device="cuda")
    staging = poisoned(*expected.shape)
    decode = [poisoned(64 * 19, case.layout.row_bytes) for _ in range(case.layers)]
    pointer_Y = pointers(decode)

    def step() -> None:
        gather_pages(pools.pointer_Y, case.dtype, pages_N, 64, case.layout, staging)
        scatter_pages(staging, pointer_Y, pages_N, 64, case.layout)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pages_N.copy_(pools.pages_N)
    graph.replay()
    assert torch.equal(staging, expected)
    for pool, rows in zip(decode, staging, strict=True):
        assert torch.equal(pool.view(19, -1)[pages_N.long()], rows.view(8, -1))
