"""Received rows of all layers copied into the pages of a decode pool, in one launch.

A page's rows lie together in the staging area and in the pool, so a page is copied as one run of
32-bit words, in vectors of four where its bytes are a multiple of 16.

Shape suffixes: Y layers, N pages, T tokens (N page_size), B bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.arguments import require_layout, require_tensor
from tpla.kernels.prepared_launch import PreparedLaunch

_BLOCK_WORDS = 2048


# One binary for chunks of any number of pages, else some of a transfer wait for a compilation.
@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=["pages_ptr"])
def _scatter_kernel(
    word_ptr,
    layer_pointer_ptr,
    pages_ptr,
    pages,
    PAGE_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    layer = tl.program_id(2)
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    ok = (index < pages)[:, None] & (word < PAGE_WORDS)[None, :]
    page = tl.load(pages_ptr + index, mask=index < pages, other=0).to(tl.int64)
    # An address read from memory has no known alignment; without it stores would be single words.
    pool = tl.load(layer_pointer_ptr + layer).to(tl.pointer_type(tl.int32))
    pool = tl.multiple_of(pool, 16)
    staged = (layer.to(tl.int64) * pages + index) * PAGE_WORDS
    words = tl.load(word_ptr + staged[:, None] + word[None, :], mask=ok)
    tl.store(pool + (page * PAGE_WORDS)[:, None] + word[None, :], words, mask=ok)


def scatter_pages(
    staging_YTB: torch.Tensor,
    layer_pointer_Y: torch.Tensor,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
) -> None:
    """Store received rows at pages of a decode pool.

    Args:
        staging_YTB: ``[layers, N * page_size, row_bytes]`` uint8 rows of ``layout``.
        layer_pointer_Y: int64 address of each layer's contiguous ``[slots, row_bytes]`` uint8
            buffer, a multiple of 16; written.
        pages_N: int32 or int64 pages to write, each within the pool and no two alike.
        page_size: tokens of a page; slot = page * page_size + offset.
        layout: what a row is.

    Raises:
        ConfigError: the row format or RoPE width is not one that the kernels read.
        ValueError: a tensor does not fit the others.
    """
    prepare_scatter_pages(staging_YTB, layer_pointer_Y, pages_N, page_size, layout)()


def prepare_scatter_pages(
    staging_YTB: torch.Tensor,
    layer_pointer_Y: torch.Tensor,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
) -> PreparedLaunch:
    """:func:`scatter_pages` of whatever the tensors hold when it is launched.

    ``pages_N`` may lie in pinned host memory.
    """
    layers, pages = layer_pointer_Y.shape[0], pages_N.shape[0]
    require_layout(layout, "scatter_pages")
    require_tensor("layer_pointer", layer_pointer_Y, (layers,), (torch.int64,))
    require_tensor("pages", pages_N, (pages,), (torch.int32, torch.int64))
    shape = (layers, pages * page_size, layout.row_bytes)
    require_tensor("staging", staging_YTB, shape, (torch.uint8,))
    page_words = page_size * layout.row_bytes // 4
    block_w = min(triton.next_power_of_2(page_words), _BLOCK_WORDS)
    block_n = _BLOCK_WORDS // block_w
    return PreparedLaunch(
        _scatter_kernel,
        (triton.cdiv(pages, block_n), triton.cdiv(page_words, block_w), layers),
        staging_YTB.view(torch.int32),
        layer_pointer_Y,
        pages_N,
        pages,
        PAGE_WORDS=page_words,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        num_warps=4,
    )
