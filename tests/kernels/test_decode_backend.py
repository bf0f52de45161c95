"""SGLang's backend around the kernels: a step of a ragged batch over scattered pages.

Runs under ``TRITON_INTERPRET=1`` (see test_interpreter.py) or on a GPU.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.decode_cases import DEVICE
from tests.kernels.helper_cases import repair_conversions
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan, PVFormat
from tpla.kernels.ref.latent_attention import latent_attention
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows
from tpla.kernels.ref.prepare_queries import prepare_queries

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreter.py", allow_module_level=True)
if DEVICE == "cpu":
    repair_conversions()
pytest.importorskip("sglang.kernels.ops.kvcache.kv_indices")

RANK, ROPE, NOPE, HEADS, PAGE = 128, 32, 32, 4, 16
LENGTHS = (1, 16, 17, 40)
EPS = 1e-6


class Step:
    """One decode step of requests of ``LENGTHS`` tokens, the last of each new, in layer 1."""

    def __init__(self, cache: CacheLayout) -> None:
        torch.manual_seed(0)
        self.cache = cache
        self.layout = layout = cache.layers[1]
        batch, most = len(LENGTHS), 64
        pages = 1 + torch.randperm(batch * most // PAGE)
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).view(batch, most)
        self.req_to_token = torch.zeros(batch + 1, most, dtype=torch.int32)
        self.request = torch.tensor([3, 1, 4, 2])
        self.req_to_token[self.request] = slots.int()
        self.rows = torch.full((PAGE * 17, layout.row_bytes), 0xFF, dtype=torch.uint8)
        for length, own in zip(LENGTHS, slots, strict=True):
            old = own[: length - 1]
            packed = pack_rows(
                torch.randn(len(old), layout.latent_width), torch.randn(len(old), ROPE), layout
            )
            self.rows[old] = packed
        self.slots = slots
        self.length = torch.tensor(LENGTHS)
        self.slot = slots[torch.arange(batch), self.length - 1]
        self.latent = torch.randn(batch, RANK + ROPE)
        self.q = torch.randn(batch, HEADS, NOPE + ROPE)
        self.w_kc = torch.randn(HEADS, NOPE, layout.latent_width) / 16
        self.gamma = torch.rand(RANK) + 0.5
        angle = torch.rand(64, ROPE // 2) * 6
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], 1)

    def to_device(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(DEVICE))

    def expected(self, rows: torch.Tensor, request: int) -> torch.Tensor:
        """Float32 attention of one request over the rows that the step left."""
        own = self.slots[request, : LENGTHS[request]]
        latent, rope = unpack_rows(rows[own], self.layout)
        q_latent, q_rope = self.queries()
        out, _ = latent_attention(q_latent[request, None], q_rope[request, None], latent, rope, 0.2)
        return out[0]

    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed and rotated, with the rounding that the row format asks for, in float32."""
        shape = (*self.q.shape[:2], self.layout.latent_width)
        scaled = self.layout.has_scale
        q_latent = self.q.new_empty(shape, dtype=torch.float8_e4m3fn if scaled else torch.bfloat16)
        q_rope = self.q.new_empty(*shape[:2], ROPE, dtype=torch.bfloat16)
        scale = self.q.new_ones(shape[:2])
        prepare_queries(
            self.q[..., :NOPE], self.q[..., NOPE:], self.w_kc, self.length - 1, self.cos_sin,
            q_latent, scale if scaled else None, q_rope,
        )  # fmt: skip
        return q_latent.float() * scale[..., None], q_rope.float() * scale[..., None]


def make_backend(
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    speculative_algorithm: str | None = None,
    pv_format: PVFormat = PVFormat.FP16,
    max_requests: int = 8,
) -> Any:
    from tpla.kernels.decode_workspace import DecodeWorkspace
    from tpla.workers.sglang_plugin import attention_backend_cuda, decode_step

    parallel = SimpleNamespace(attn_tp_rank=step.layout.group, attn_tp_size=step.layout.plan.groups)
    monkeypatch.setattr(attention_backend_cuda, "get_parallel", lambda: parallel)
    monkeypatch.setattr(
        decode_step,
        "DecodeWorkspace",
        lambda *args, **kwargs: DecodeWorkspace(*args, multiprocessors=3, **kwargs),
    )
    pool = SimpleNamespace(
        layout=step.cache, layer_layout=step.cache.layers.__getitem__, page_size=PAGE,
        device=DEVICE, rows=lambda layer: step.rows,
    )  # fmt: skip
    return attention_backend_cuda.LatentDecodeBackend(
        SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=step.req_to_token, size=max_requests),
            token_to_kv_pool=pool,
            server_args=SimpleNamespace(speculative_algorithm=speculative_algorithm),
            model_config=SimpleNamespace(num_attention_heads=HEADS),
        ),
        pv_format,
    )


CACHE = CacheLayout(ModelPlan(RANK, 1, (0, 0)), 0, ROPE, KVFormat.FP8, row_align=16)


def test_a_prompt_on_a_decode_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(Step(CACHE), monkeypatch)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, name="EXTEND")
    with pytest.raises(ConfigError, match="prompts go to prefill"):
        backend.init_forward_metadata_out_graph(SimpleNamespace(forward_mode=mode))


def test_speculative_decoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--speculative-algorithm EAGLE"):
        make_backend(Step(CACHE), monkeypatch, speculative_algorithm="EAGLE")


def test_p_v_in_fp8_is_refused_where_only_the_triton_kernel_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(CACHE)
    with pytest.raises(ConfigError, match=f"pages of {PAGE}, on .*: use --pv-format fp16"):
        make_backend(step, monkeypatch, pv_format=PVFormat.FP8)


def test_a_full_batch_may_be_padded_to_a_multiple_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(CacheLayout(ModelPlan(RANK, 2, (0, 0)), 0, ROPE, KVFormat.FP8, row_align=16))
    step.to_device()
    backend = make_backend(step, monkeypatch, max_requests=len(LENGTHS) - 1)
    padded = torch.tensor([*LENGTHS[:-1], backend.get_cuda_graph_seq_len_fill_value()])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True),
        batch_size=len(LENGTHS),
        req_pool_indices=torch.tensor([3, 1, 4, 0], device=DEVICE),  # SGLang pads with 0
        seq_lens=padded.to(DEVICE),
    )
    backend.init_forward_metadata_out_graph(batch)
    assert backend._step.length_B.tolist() == padded.tolist()


@pytest.mark.parametrize("pv_format", list(PVFormat))
def test_p_v_is_asked_for_in_the_format_of_the_worker(
    pv_format: PVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpla.workers.sglang_plugin import attention_backend_cuda

    monkeypatch.setattr(attention_backend_cuda, "require_fp8_values", lambda *_: None)
    step = Step(CACHE)
    backend = make_backend(step, monkeypatch, pv_format=pv_format)
    tiling = backend._step.workspace(step.layout).tiling
    assert tiling.fp8_values is (pv_format is PVFormat.FP8)


@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.BF16])
@pytest.mark.parametrize(("groups", "core", "group"), [(1, 0, 0), (2, 0, 1), (2, 32, 0)])
def test_a_step_stores_its_tokens_and_attends_to_all(
    kv_format: KVFormat, groups: int, core: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpla.workers.sglang_plugin.attention_backend_cuda import Rotation

    other_core = 0 if groups == 1 else 64
    plan = ModelPlan(RANK, groups, (other_core, core))
    step = Step(CacheLayout(plan, group, ROPE, kv_format, row_align=16))
    layout = step.layout
    step.to_device()
    backend = make_backend(step, monkeypatch)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(LENGTHS),
        req_pool_indices=step.request,
        seq_lens=step.length,
    )
    rotation = Rotation(step.length - 1, step.cos_sin, interleaved=True)
    norm = SimpleNamespace(weight=step.gamma, variance_epsilon=EPS)
    backend.init_forward_metadata_out_graph(batch)
    backend.append(1, step.latent, norm, rotation, step.slot)
    out = backend.attend(1, step.q, step.w_kc, rotation, 0.2)

    normed = step.latent[:, :RANK] * torch.rsqrt(
        step.latent[:, :RANK].square().mean(-1, keepdim=True) + EPS
    )
    start, stop = layout.plan.slice_bounds(group)
    part = (normed * step.gamma)[:, [*range(core), *range(start, stop)]]
    stored, _ = unpack_rows(step.rows[step.slot], layout)
    torch.testing.assert_close(stored, part, atol=0.15 if layout.has_scale else 0.02, rtol=0.05)
    for request in range(len(LENGTHS)):
        expected = step.expected(step.rows, request)
        torch.testing.assert_close(out[request].float(), expected, atol=0.03, rtol=0.05)
