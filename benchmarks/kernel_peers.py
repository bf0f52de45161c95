"""Other projects' decode attention at head-sharded MLA's shape, where they are installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpla.benchmarks.kernel_cases import COLD_BYTES, KV_LORA_RANK, PAGE_SIZE, QK_ROPE_HEAD_DIM
from tpla.benchmarks.kernel_timing import graph_us

_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
_SCALE = (128 + QK_ROPE_HEAD_DIM) ** -0.5
_SGLANG_SPLITS = 8


class PeerInputs:
    """Queries, pages and tables of head-sharded MLA at one shape, in the peer's own dtype."""

    def __init__(
        self, heads: int, batch: int, context: int, query_len: int, dtype: torch.dtype
    ) -> None:
        self.heads, self.batch, self.context, self.query_len = heads, batch, context, query_len
        pages = -(-context // PAGE_SIZE)
        self.sets = max(1, -(-COLD_BYTES // (batch * context * _DIM * dtype.itemsize)))
        count = self.sets * batch * pages
        self.cache = torch.empty(count, PAGE_SIZE, 1, _DIM, dtype=dtype, device="cuda")
        for chunk in self.cache.split(1024):
            chunk.copy_(torch.randn(chunk.shape, device="cuda").to(dtype))
        self.table = torch.randperm(count, device="cuda").to(torch.int32)
        self.table = self.table.view(self.sets, batch, pages)
        self.length = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, query_len, heads, _DIM, device="cuda").to(dtype)


def _flashmla(inputs: PeerInputs) -> Callable[[int], None]:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    fp8 = inputs.cache.dtype == torch.float8_e4m3fn
    metadata, splits = get_mla_metadata(
        inputs.length, inputs.query_len * inputs.heads, 1, inputs.heads, is_fp8_kvcache=fp8
    )
    one = torch.ones(1, device="cuda")
    descale = {"descale_q": one, "descale_k": one, "is_fp8_kvcache": True} if fp8 else {}

    def launch(index: int) -> None:
        flash_mla_with_kvcache(
            inputs.q,
            inputs.cache,
            inputs.table[index],
            inputs.length,
            KV_LORA_RANK,
            metadata,
            splits,
            _SCALE,
            inputs.query_len > 1,
            **descale,
        )

    return launch


def _sglang_triton(inputs: PeerInputs) -> Callable[[int], None]:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    batch, context = inputs.batch, inputs.context
    rows = inputs.cache.view(-1, 1, _DIM)
    pages = -(-context // PAGE_SIZE)
    offset = torch.arange(PAGE_SIZE, device="cuda")
    slots = inputs.table.long()[..., None] * PAGE_SIZE + offset
    indices = slots.view(inputs.sets, batch, pages * PAGE_SIZE)[..., :context].reshape(
        inputs.sets, -1
    )
    indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context
    logits = torch.empty(batch, inputs.heads, _SGLANG_SPLITS, KV_LORA_RANK, device="cuda")
    lse = torch.empty(batch, inputs.heads, _SGLANG_SPLITS, device="cuda")
    splits = torch.full((batch,), _SGLANG_SPLITS, dtype=torch.int32, device="cuda")
    q = inputs.q[:, 0]
    out = torch.empty(batch, inputs.heads, KV_LORA_RANK, dtype=q.dtype, device="cuda")

    def launch(index: int) -> None:
        decode_attention_fwd(
            q, rows, rows[..., :KV_LORA_RANK], out, indptr, indices[index], logits, lse, splits,
            _SGLANG_SPLITS, _SCALE, 1.0, 1.0, has_mla=True,
        )  # fmt: skip

    return launch


_PEERS: dict[str, tuple[Callable[[PeerInputs], Callable[[int], None]], torch.dtype]] = {
    "flashmla_bf16": (_flashmla, torch.bfloat16),
    "flashmla_fp8": (_flashmla, torch.float8_e4m3fn),
    "sglang_triton_bf16": (_sglang_triton, torch.bfloat16),
}


def peer_us(
    heads: int, batch: int, context: int, query_len: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of each peer, and why a peer has none.

    A peer's output is not checked here: it is the other project's kernel, called as documented.
    """
    times, absent = {}, {}
    for name, (build, dtype) in _PEERS.items():
        if build is _sglang_triton and query_len > 1:
            absent[name] = "one query token only"
            continue
        try:
            inputs = PeerInputs(heads, batch, context, query_len, dtype)
            times[name] = graph_us(build(inputs), inputs.sets)
        except Exception as error:  # an absent or failing peer must not stop the run
            absent[name] = f"{type(error).__name__}: {error}"[:200]
    return times, absent
