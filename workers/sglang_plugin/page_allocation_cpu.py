"""Page allocation in torch, for CPU workers: SGLang's own functions launch Triton kernels."""

from __future__ import annotations

from typing import Any

import torch


def alloc_extend(
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """Slots for each request's new tokens: the rest of its last page, then fresh pages.

    Returns:
        ``[extend_num_tokens]`` int64 slots, or None when too few pages are free.
    """
    page_size = self.page_size
    prefixes, lengths = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
    needed = sum(
        _pages(length, page_size) - _pages(prefix, page_size)
        for prefix, length in zip(prefixes, lengths, strict=True)
    )
    if self.need_sort and extend_num_tokens // page_size + len(prefixes) + 1 > len(self.free_pages):
        self.merge_and_sort_free()
    if needed > len(self.free_pages):
        return None
    slots: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
    used = 0
    for prefix, length, last in zip(prefixes, lengths, last_loc.tolist(), strict=True):
        in_last_page = min(length, _pages(prefix, page_size) * page_size) - prefix
        slots.append(torch.arange(last + 1, last + 1 + in_last_page))
        fresh = _pages(length, page_size) - _pages(prefix, page_size)
        pages = self.free_pages[used : used + fresh]
        used += fresh
        page_slots = (pages[:, None] * page_size + torch.arange(page_size)[None]).reshape(-1)
        slots.append(page_slots[: length - prefix - in_last_page])
    self.free_pages = self.free_pages[needed:]
    return torch.cat(slots).to(torch.int64)


def alloc_decode(
    self: Any, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
) -> torch.Tensor | None:
    """One slot a request: the next of its page, or the first of a fresh one.

    Returns:
        ``[batch]`` int64 slots, or None when too few pages are free; nothing is taken then.
    """
    page_size = self.page_size
    if self.need_sort and len(seq_lens) > len(self.free_pages):
        self.merge_and_sort_free()
    lengths = seq_lens_cpu.tolist()
    needed = sum((length - 1) % page_size == 0 for length in lengths)
    if needed > len(self.free_pages):
        return None
    fresh = iter(self.free_pages[:needed].tolist())
    slots = [
        next(fresh) * page_size if (length - 1) % page_size == 0 else last + 1
        for length, last in zip(lengths, last_loc.tolist(), strict=True)
    ]
    self.free_pages = self.free_pages[needed:]
    return torch.tensor(slots, dtype=torch.int64)


def get_last_loc(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last cached token, -1 for an empty one."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def _pages(tokens: int, page_size: int) -> int:
    return (tokens + page_size - 1) // page_size
