"""What all layers of one decode step share on the GPU: page tables, lengths and schedules.

Shape suffixes: B requests, N block-table entries.
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.kvcache.kv_indices import (
    create_flashmla_kv_indices_triton,
    get_num_kv_index_blocks_flashmla,
)

from tpla.core.latent_layout import CacheLayout, LatentLayout, PVFormat
from tpla.kernels.decode_workspace import DecodeWorkspace, default_tiling


class DecodeStep:
    """Tensors at addresses that do not change, so that a captured graph reads each step's values.

    Args:
        max_requests: largest batch.
        max_tokens: longest request.
        heads: heads of this rank.
        layout: the pool's rows; layers whose rows are alike share a workspace.
        pv_format: of P V, where the rows are FP8.
        page_size: tokens of a page.
        device: of the pool.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        heads: int,
        layout: CacheLayout,
        pv_format: PVFormat,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        self.max_requests = max_requests
        self.page_size = page_size
        pages = -(-max_tokens // page_size)
        self._table = torch.zeros(max_requests, pages, dtype=torch.int32, device=device)
        self._length = torch.zeros(max_requests, dtype=torch.int32, device=device)
        fp8_values = pv_format is PVFormat.FP8
        self._workspaces = {
            run.layout: DecodeWorkspace(
                max_requests,
                1,
                heads,
                run.layout,
                default_tiling(run.layout, heads, fp8_values),
                device=device,
            )
            for run in layout.runs
        }
        self.requests = 0

    @property
    def table_BN(self) -> torch.Tensor:
        """Pages of each request, int32; entries beyond its length hold what they held before."""
        return self._table[: self.requests]

    @property
    def length_B(self) -> torch.Tensor:
        """Cached tokens of each request with the one of this step, int32."""
        return self._length[: self.requests]

    def workspace(self, layout: LatentLayout) -> DecodeWorkspace:
        """Scratch memory of the layers with these rows, scheduled for :attr:`length_B`."""
        return self._workspaces[layout].of_batch(self.requests)

    def fill(
        self, req_to_token: torch.Tensor, request_B: torch.Tensor, length_B: torch.Tensor
    ) -> None:
        """Take over a batch, without waiting for the device.

        SGLang lets the next step change ``req_to_token`` as soon as this has been queued, so pages
        are read here and not by the layers.

        Args:
            req_to_token: slots of each request of the engine, int32.
            request_B: rows of ``req_to_token``.
            length_B: tokens of each request.
        """
        self.requests = len(request_B)
        self._length[: self.requests].copy_(length_B)
        blocks = get_num_kv_index_blocks_flashmla(self._table.stride(0), self.page_size)
        create_flashmla_kv_indices_triton[(self.requests, blocks)](
            req_to_token,
            request_B,
            self.length_B,
            None,
            self._table,
            req_to_token.stride(0),
            self._table.stride(0),
            PAGED_SIZE=self.page_size,
        )
        for layout in self._workspaces:
            self.workspace(layout).schedule(self.length_B)
