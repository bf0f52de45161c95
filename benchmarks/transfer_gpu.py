"""KV transfer between two GPUs of one host beside a plain peer copy, in one run.

    python -m tpla.benchmarks.transfer_gpu --json OUT [--commit COMMIT]

Two processes, as in serving: a prefill rank on the first GPU, a decode rank on the second, both
with DeepSeek-V3's 61 layers. A figure is the time from the push of a request's pages to its
acknowledgement: gather from the prefill pool, slicing, quantisation, digest, transfer, digest,
scatter into the decode pool and the messages around them; the median of the repetitions.

Rows of ``transfer_stages`` say what each stage of one chunk of the first system costs by itself.

The peer copy moves as many bytes in one ``tensor.copy_`` from GPU to GPU (``cudaMemcpyPeer``) and
does nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from tpla.benchmarks.command import command_line
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.transfer import METADATA, TIMEOUTS, RoomEnd, identity
from tpla.benchmarks.transfer_stages import kernel_stages, wire_stage
from tpla.core.config.environment import NCCL_TRANSFER, put
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.transfer.group_plane import CHUNK_BYTES, GroupReceivingPlane, GroupSendingPlane
from tpla.workers.transfer.message_plane import MessageReceivingPlane, MessageSendingPlane
from tpla.workers.transfer.pair_group import DECODE_RANK, PREFILL_RANK
from tpla.workers.transfer.pool_access import decode_pages, prefill_pages
from tpla.workers.transfer.protocol import (
    Link,
    ReceivingPlane,
    Reservation,
    SendingPlane,
)
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

MODEL, KV_LORA_RANK, QK_ROPE_HEAD_DIM = "DeepSeek-V3", 512, 64
PAGE_SIZE, ROW_ALIGN = 64, 16
_SPARE_PAGES = 2
WARM_UPS = 3
_PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class System:
    """A data plane and what it moves."""

    name: str
    groups: int
    kv_format: KVFormat

    def layout(self, layers: int) -> CacheLayout:
        """Rows of the first rank."""
        plan = ModelPlan(KV_LORA_RANK, self.groups, (0,) * layers)
        return CacheLayout(plan, 0, QK_ROPE_HEAD_DIM, self.kv_format, ROW_ALIGN)


SYSTEMS = (
    System("nccl", 2, KVFormat.FP8),
    System("nccl", 1, KVFormat.BF16),
    System("zmq", 2, KVFormat.FP8),
)


@dataclass(frozen=True)
class Setup:
    """Where and how much; ``gloo`` between CPUs serves a test of this file."""

    source: str = "cuda:0"
    target: str = "cuda:1"
    backend: str = "nccl"
    layers: int = 61
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    repetitions: int = 20

    def pages(self, context: int) -> int:
        """Pages of a request."""
        return -(-context // PAGE_SIZE)

    def nbytes(self, system: System, context: int) -> int:
        """Rows of a request."""
        return self.pages(context) * PAGE_SIZE * system.layout(self.layers).token_bytes


def prefill_pool(setup: Setup) -> Any:
    """Random rows for the longest context on the source device."""
    shape = (setup.pages(max(setup.contexts)) * PAGE_SIZE, 1, KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    buffers = [
        torch.randn(shape, dtype=torch.bfloat16, device=setup.source) for _ in range(setup.layers)
    ]
    return SimpleNamespace(
        kv_buffer=buffers, layer_num=setup.layers, page_size=PAGE_SIZE, kv_lora_rank=KV_LORA_RANK
    )


def _decode_pool(setup: Setup, layout: CacheLayout) -> Any:
    slots = (setup.pages(max(setup.contexts)) + _SPARE_PAGES) * PAGE_SIZE
    buffers = [
        torch.zeros((slots, 1, each.row_bytes), dtype=torch.uint8, device=setup.target)
        for each in layout.layers
    ]
    return SimpleNamespace(
        kv_buffer=buffers, layer_num=setup.layers, page_size=PAGE_SIZE, layout=layout
    )


def decode_process(setup: Setup, system: System, port: int, pipe: Connection) -> None:
    """Reserve a room for each number of pages that is asked for."""
    torch.set_num_threads(1)
    sink, events = decode_pages(_decode_pool(setup, system.layout(setup.layers))), RoomEnd()
    link = ZmqClientLink("benchmark")
    plane: ReceivingPlane = MessageReceivingPlane(link, sink)
    if system.name == "nccl":
        plane = GroupReceivingPlane(sink, setup.backend, TIMEOUTS)
    receiver = DecodeReceiver(link, plane, identity(), TIMEOUTS, events, lambda peer: None)
    endpoint, room = f"tcp://127.0.0.1:{port}", 0
    while (pages := pipe.recv()) > 0:
        room += 1
        events.done.clear()
        receiver.expect(room, [endpoint])
        receiver.greet(endpoint)
        wanted = np.random.default_rng(room).permutation(pages).astype(np.int32) + _SPARE_PAGES
        receiver.reserve(room, Reservation(wanted, endpoint, (), 1, 0))
        events.done.wait(_PATIENCE_SECONDS)
        receiver.forget(room)
        pipe.send(str(events.error) if events.error else "")
    receiver.close()


Decode = Callable[[Setup, System, int, Connection], None]
"""What a decode rank's process runs: the port of its prefill rank, and a pipe to it."""


class PrefillRank:
    """This process's rank, and the pipe to decode's."""

    def __init__(
        self, setup: Setup, system: System, pool: Any, decode: Decode = decode_process
    ) -> None:
        link, self._events = ZmqServerLink("127.0.0.1"), RoomEnd()
        self._sender = PrefillSender(
            link, _sending_plane(setup, system, link, pool), identity(), TIMEOUTS, self._events
        )
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=decode, args=(setup, system, link.port, theirs)
        )
        self._process.start()
        self._room = 0

    def migrate(self, pages: int) -> float:
        """Seconds from the push of ``pages`` pages to the acknowledgement."""
        self._room += 1
        self._events.ready.clear()
        self._events.done.clear()
        self._sender.open(self._room)
        self._pipe.send(pages)
        if not self._events.ready.wait(_PATIENCE_SECONDS):
            raise RuntimeError("no figure: decode has not reserved")
        order = np.random.default_rng(self._room).permutation(pages).astype(np.int32)
        begun = time.perf_counter()
        self._sender.push(self._room, 0, order, METADATA)
        self._events.done.wait(_PATIENCE_SECONDS)
        seconds = time.perf_counter() - begun
        error = self._pipe.recv() or self._events.error
        if error:
            raise RuntimeError(f"no figure for a transfer that failed: {error}")
        self._sender.forget(self._room)
        return seconds

    def close(self) -> None:
        """End both ranks."""
        self._pipe.send(0)
        self._process.join(30)
        self._sender.close()


def _sending_plane(setup: Setup, system: System, link: Link, pool: Any) -> SendingPlane:
    source = prefill_pages(pool)
    if system.name == "nccl":
        return GroupSendingPlane(source, setup.backend, TIMEOUTS)
    return MessageSendingPlane(link, source)


def measure_copy(setup: Setup, nbytes: int) -> float:
    """Seconds of a plain copy from GPU to GPU; the median."""
    source_B = torch.zeros(nbytes, dtype=torch.uint8, device=setup.source)
    target_B = torch.empty(nbytes, dtype=torch.uint8, device=setup.target)
    seconds = []
    for _ in range(WARM_UPS + setup.repetitions):
        _synchronize(setup)
        begun = time.perf_counter()
        target_B.copy_(source_B)
        _synchronize(setup)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[WARM_UPS:])


def _synchronize(setup: Setup) -> None:
    for name in (setup.source, setup.target):
        if name.startswith("cuda"):
            torch.cuda.synchronize(name)


def measure(setup: Setup) -> list[dict[str, Any]]:
    """A row for each system and context."""
    pool, rows = prefill_pool(setup), []
    for system in SYSTEMS:
        prefill = PrefillRank(setup, system, pool)
        for context in setup.contexts:
            pages, nbytes = setup.pages(context), setup.nbytes(system, context)
            seconds = [prefill.migrate(pages) for _ in range(WARM_UPS + setup.repetitions)]
            median = statistics.median(seconds[WARM_UPS:])
            rows.append(
                {
                    "benchmark": "transfer",
                    "model": MODEL,
                    "system": system.name,
                    "groups": system.groups,
                    "kv_format": system.kv_format.value,
                    "context": context,
                    "bytes": nbytes,
                    "ms": median * 1e3,
                    "gb_per_s": nbytes / median / 1e9,
                    "peer_copy_pct": 100 * measure_copy(setup, nbytes) / median,
                }
            )
        prefill.close()
    return rows


def measure_stages(setup: Setup) -> list[dict[str, Any]]:
    """A row for each stage of one whole chunk of the first system."""
    system, pool = SYSTEMS[0], prefill_pool(setup)
    layout = system.layout(setup.layers)
    pages = CHUNK_BYTES // (PAGE_SIZE * layout.token_bytes)
    nbytes = pages * PAGE_SIZE * layout.token_bytes
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_wire_process, args=(theirs, setup, nbytes)
    )
    process.start()
    source = torch.device(setup.source)
    stages = kernel_stages(pool, layout, pages)
    stages += [wire_stage(pipe, setup.backend, PREFILL_RANK, source, nbytes), pipe.recv()]
    process.join(30)
    common = {"benchmark": "transfer_stages", "model": MODEL, "system": system.name}
    return [{**common, "bytes": nbytes, **stage} for stage in stages]


def _wire_process(pipe: Connection, setup: Setup, nbytes: int) -> None:
    target = torch.device(setup.target)
    pipe.send(wire_stage(pipe, setup.backend, DECODE_RANK, target, nbytes))


def header(commit: str | None) -> dict[str, Any]:
    """What the numbers belong to."""
    command = command_line("transfer_gpu")
    return {
        **describe_machine(command, commit),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "page_size": PAGE_SIZE,
        "layers": Setup.layers,
        "chunk_bytes": CHUNK_BYTES,
    }


def main(
    repetitions: Annotated[int, typer.Option(help="timed repetitions of each figure")] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="file to write")] = None,
    commit: Annotated[str | None, typer.Option(help="of a copy without git")] = None,
) -> None:
    """Measure, print lines, write JSON."""
    put(NCCL_TRANSFER)
    setup = Setup(repetitions=repetitions)
    rows, stages = measure(setup), measure_stages(setup)
    console = Console()
    for row in stages:
        console.print(
            f"{row['stage']:8} of {row['bytes'] / 1e6:.1f} MB "
            f"{row['device_us']:7.1f} us on the device, {row['host_us']:6.1f} us of the host"
        )
    for row in rows:
        console.print(
            f"{row['system']:5} g={row['groups']} {row['kv_format']:5} {row['context']:6} tokens "
            f"{row['bytes'] / 1e6:8.1f} MB {row['ms']:9.3f} ms {row['gb_per_s']:7.1f} GB/s "
            f"{row['peer_copy_pct']:5.1f} % of the peer copy",
            soft_wrap=True,
        )
    if json_path is not None:
        json_path.write_text(
            json.dumps({"header": header(commit), "rows": rows + stages}, indent=1) + "\n"
        )


if __name__ == "__main__":
    typer.run(main)
