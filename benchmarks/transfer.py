"""KV transfer over ZMQ on loopback beside a plain TCP copy, in one run.

    python -m tpla.benchmarks.transfer --json OUT

Two processes, as in serving: one prefill rank sends rows to one decode rank. The plain copy moves
as many bytes through one TCP connection between the same two processes, ``sendall`` from and
``recv_into`` a buffer. Three figures for the transfer, each the median of the repetitions:

* ``wire``: rows lie ready, as a page gather on a GPU would leave them; checksum, ZMQ, credit and
  acknowledgement included;
* ``stored``: also written into the decode pool's pages;
* ``whole``: also gathered from the prefill pool's pages, sliced and quantised to FP8 on the CPU.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import socket
import statistics
import subprocess
import threading
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
import zmq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tpla.core.config import TransferTimeouts
from tpla.core.errors import TransferError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.transfer.message_plane import MessageReceivingPlane, MessageSendingPlane
from tpla.workers.transfer.pool_access import DecodePages, PrefillPages
from tpla.workers.transfer.protocol import Identity, Pages, Reservation, Rows
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

LAYERS, PAGE_SIZE, METADATA = 27, 64, bytes(64)
KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64
PLAN = ModelPlan(KV_LORA_RANK, 2, (0,) * LAYERS)
LAYOUT = CacheLayout(PLAN, 0, QK_ROPE_HEAD_DIM, KVFormat.FP8)
ROW_BYTES = LAYOUT.token_bytes // LAYERS
TIMEOUTS = TransferTimeouts()
_SPARE_PAGES = 4


def identity() -> Identity:
    """Both ends are of the same checkpoint."""
    return Identity("benchmark", "0" * 64, len(METADATA), KV_LORA_RANK, QK_ROPE_HEAD_DIM)


@dataclass(frozen=True)
class Case:
    """What is on the way from pages to pages."""

    name: str
    packs: bool
    stores: bool


CASES = (Case("wire", False, False), Case("stored", False, True), Case("whole", True, True))


class RoomEnd:
    """Signals the end of a room to whoever waits."""

    def __init__(self) -> None:
        self.ready, self.done = threading.Event(), threading.Event()
        self.error: TransferError | None = None

    def on_ready(self, room: int, decode_prefix_len: int) -> None:
        self.ready.set()

    def on_done(self, room: int, metadata: bytes) -> None:
        self.done.set()

    def on_failed(self, room: int, error: TransferError) -> None:
        self.error = error
        self.ready.set()
        self.done.set()


class _ReadyRows(PrefillPages):
    """A source whose rows were packed before."""

    def __init__(self, pages: int) -> None:
        super().__init__(_prefill_pool(0))
        generator = np.random.default_rng(0)
        size = min(pages, 64) * PAGE_SIZE * LAYOUT.token_bytes
        self._rows = generator.integers(0, 256, size, dtype=np.uint8)

    def read(self, pages: Pages, layout: CacheLayout) -> Rows:
        return self._rows[: len(pages) * PAGE_SIZE * layout.token_bytes]


class _Discard(DecodePages):
    """A sink that drops what arrives."""

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        """Nothing is stored."""
        return intact()


def _prefill_pool(pages: int) -> Any:
    width = KV_LORA_RANK + QK_ROPE_HEAD_DIM
    buffers = [torch.randn(pages * PAGE_SIZE, 1, width).bfloat16() for _ in range(LAYERS)]
    return SimpleNamespace(
        kv_buffer=buffers, layer_num=LAYERS, page_size=PAGE_SIZE, kv_lora_rank=KV_LORA_RANK
    )


def _decode_pool(pages: int) -> Any:
    shape = (pages * PAGE_SIZE, 1, ROW_BYTES)
    buffers = [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYERS)]
    return SimpleNamespace(kv_buffer=buffers, layer_num=LAYERS, page_size=PAGE_SIZE, layout=LAYOUT)


def _decode_process(case: Case, pages: int, rooms: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pool = _decode_pool(pages + _SPARE_PAGES)
    link, events = ZmqClientLink("benchmark"), RoomEnd()
    plane = MessageReceivingPlane(link, DecodePages(pool) if case.stores else _Discard(pool))
    receiver = DecodeReceiver(link, plane, identity(), TIMEOUTS, events, lambda peer: None)
    endpoint = f"tcp://127.0.0.1:{port}"
    for room in range(1, rooms + 1):
        events.done.clear()
        receiver.expect(room, [endpoint])
        receiver.greet(endpoint)
        wanted = np.arange(pages, dtype=np.int32) + _SPARE_PAGES // 2
        receiver.reserve(room, Reservation(wanted, endpoint, (), 1, 0))
        events.done.wait(120)
        receiver.forget(room)
        pipe.send(str(events.error) if events.error else "")
        pipe.recv()
    receiver.close()


def measure_transfer(case: Case, pages: int, repetitions: int) -> float:
    """Seconds for ``pages`` pages of one request, from push to acknowledgement; the median."""
    link, events = ZmqServerLink("127.0.0.1"), RoomEnd()
    source = PrefillPages(_prefill_pool(pages)) if case.packs else _ReadyRows(pages)
    sender = PrefillSender(link, MessageSendingPlane(link, source), identity(), TIMEOUTS, events)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_decode_process, args=(case, pages, repetitions + 1, link.port, there)
    )
    process.start()
    seconds = []
    for room in range(1, repetitions + 2):
        events.ready.clear()
        events.done.clear()
        sender.open(room)
        assert events.ready.wait(120)
        begun = time.perf_counter()
        sender.push(room, 0, np.arange(pages, dtype=np.int32), METADATA)
        assert events.done.wait(120)
        seconds.append(time.perf_counter() - begun)
        sender.forget(room)
        error = here.recv()
        if error or events.error:
            raise RuntimeError(f"no figure for a transfer that failed: {error or events.error}")
        here.send("next")
    process.join(30)
    sender.close()
    return statistics.median(seconds[1:])


def _copy_process(total: int, rounds: int, port: int) -> None:
    buffer = bytearray(4 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for _ in range(rounds):
            received = 0
            while received < total:
                received += connection.recv_into(buffer)
            connection.sendall(b"k")


def measure_copy(total: int, repetitions: int) -> float:
    """Seconds to move ``total`` bytes through one TCP connection; the median."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        process = multiprocessing.get_context("spawn").Process(
            target=_copy_process, args=(total, repetitions + 1, server.getsockname()[1])
        )
        process.start()
        connection, _ = server.accept()
        payload = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8).data
        seconds = []
        with connection:
            for _ in range(repetitions + 1):
                begun, sent = time.perf_counter(), 0
                while sent < total:
                    piece = payload[: min(len(payload), total - sent)]
                    connection.sendall(piece)
                    sent += len(piece)
                connection.recv(1)
                seconds.append(time.perf_counter() - begun)
        process.join(30)
    return statistics.median(seconds[1:])


def header() -> dict[str, Any]:
    """Commit, machine and versions."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "unknown",
        "machine": platform.processor() or platform.machine(),
        "cores": multiprocessing.cpu_count(),
        "gpu": None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyzmq": zmq.__version__,
            "libzmq": zmq.zmq_version(),
        },
    }


def main(
    tokens: Annotated[int, typer.Option(help="tokens of the request, a multiple of 64")] = 16384,
    rounds: Annotated[int, typer.Option(help="each measures every figure, one beside another")] = 5,
    repetitions: Annotated[int, typer.Option(help="timed repetitions in a round")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="file to write")] = None,
) -> None:
    """Measure, print a table, write JSON."""
    torch.set_num_threads(1)
    pages = tokens // PAGE_SIZE
    total = pages * PAGE_SIZE * LAYOUT.token_bytes
    mla_bytes = 2 * (KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    console = Console()
    measured = []
    for _ in track(range(rounds), "rounds", console=console):
        seconds = {"tcp copy": measure_copy(total, repetitions)}
        seconds |= {case.name: measure_transfer(case, pages, repetitions) for case in CASES}
        measured.append(seconds)
    rows = [_row(name, total, measured) for name in measured[0]]
    table = Table(title=f"{tokens} tokens, {LAYERS} layers, {total / 1e6:.0f} MB on the wire")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    console.print(
        f"bytes per token and layer on the wire to one rank: {ROW_BYTES} "
        f"(bf16 MLA: {mla_bytes}, {mla_bytes / ROW_BYTES:.2f}x)"
    )
    if json_path is not None:
        document = {"header": header(), "wire_row_bytes": ROW_BYTES,
                    "bf16_mla_row_bytes": mla_bytes, "rows": rows}  # fmt: skip
        json_path.write_text(json.dumps(document, indent=1) + "\n")


def _row(name: str, total: int, measured: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds; the ratio is to the copy of the same round."""
    seconds = statistics.median(times[name] for times in measured)
    ratios = sorted(times["tcp copy"] / times[name] for times in measured)
    return {
        "figure": name,
        "bytes": total,
        "ms": seconds * 1e3,
        "gb_per_s": total / seconds / 1e9,
        "of_tcp_copy": statistics.median(ratios),
        "of_tcp_copy_min": ratios[0],
        "of_tcp_copy_max": ratios[-1],
    }


if __name__ == "__main__":
    typer.run(main)
