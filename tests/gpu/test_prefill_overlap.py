"""Prefill with SGLang's own attention and overlap: rows leave when their forward has written them.

SGLang hands over a chunk while its forward may still run, with an event to wait for. A forward of
the embedded model is over too soon to tell who waits, and SGLang's scheduler happens to wait for it
when it looks up which pages these are. So a plug-in, which only this test installs, keeps the GPU
busy before each layer writes its rows, and takes that other wait away: a row that is read too soon
is the pool's former contents, and other tokens follow from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, worker_set
from tests.e2e.independent_reference import Reference
from tests.e2e.prompts import chat_prompts
from tests.e2e.servers import Worker, ask, idle
from tests.gpu.test_serving import FLAGS, TOLERANCE

pytestmark = pytest.mark.gpu

CHUNK, CHUNKS = 128, 4
TOKENS, PROMPTS = 12, 4

BUSY_CYCLES, BUSY_SECONDS = 40_000_000, 0.02
"""For every layer; 1.98 GHz is the most that an H200 runs at."""
LAYERS = 6

PLUGIN = f"""
import torch

POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool."
BARRIER = "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier"

def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    for write in ("set_kv_buffer", "set_mla_kv_buffer"):
        HookRegistry.register(POOL + write, keep_busy, HookType.BEFORE)
    HookRegistry.register(BARRIER, lambda scheduler: None, HookType.REPLACE)

def keep_busy(*args, **kwargs):
    torch.cuda._sleep({BUSY_CYCLES})
"""


def install(folder: Path) -> None:
    """The plug-in, as pip would, for processes that have ``folder`` in their path."""
    (folder / "slow_writes.py").write_text(PLUGIN)
    about = folder / "slow_writes-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_writes\nVersion: 1\n")
    entry_point = "[sglang.srt.plugins]\nslow_writes = slow_writes:load\n"
    (about / "entry_points.txt").write_text(entry_point)


@pytest.fixture(params=["zmq", "nccl"])
def workers(
    request: pytest.FixtureRequest,
    conversions: Conversions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Worker, Worker]]:
    """Prefill whose forwards write slowly, and decode."""
    over_nccl = request.param == "nccl"
    if over_nccl and torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs: one cannot be two peers of an NCCL group")
    model = conversions.of(REFERENCE_MODEL, 2, "0")
    common = (*FLAGS, "--transfer", request.param)
    own_attention = ("--mode", "mla", "--attention-backend", "triton")
    with worker_set(tmp_path) as start:
        decode_gpu = ("--base-gpu-id", "1" if over_nccl else "0")
        decode = start("decode", model, *common, *decode_gpu, "--mode", "mla")
        install(tmp_path)
        before = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{before}")
        chunks = ("--chunked-prefill-size", str(CHUNK))
        prefill = start("prefill", model, *common, *own_attention, *chunks)
        prefill.wait()
        yield prefill, decode.wait()


def test_rows_leave_when_their_forward_has_written_them(
    workers: tuple[Worker, Worker], conversions: Conversions
) -> None:
    prefill, decode = workers
    reference = Reference(conversions.of(REFERENCE_MODEL, 2, "0"), "bf16", sliced=False)
    prompts = [p for p in chat_prompts(40, longest=900) if len(p) > CHUNK * (CHUNKS - 1)]
    assert len(prompts) >= PROMPTS
    gaps = []
    for prompt in prompts[:PROMPTS]:
        begun = time.monotonic()
        ids = ask(prefill, decode, prompt, TOKENS).ids
        assert time.monotonic() - begun > BUSY_SECONDS * LAYERS * CHUNKS  # the plug-in is at work
        gaps += reference.gaps(prompt, ids)
    print(f"{len(gaps)} tokens, worst gap {max(gaps):.3f}")
    assert max(gaps) <= TOLERANCE
    idle(prefill)
    idle(decode)
