"""A prefill rank and decode ranks in one process: rows over the fake link, real ZMQ or gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tpla.core.config import FaultPlan, TransferTimeouts
from tpla.core.errors import TransferError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.transfer.fake_link import FakeLink
from tpla.workers.transfer.faults import FaultySendingPlane
from tpla.workers.transfer.group_plane import GroupReceivingPlane, GroupSendingPlane
from tpla.workers.transfer.message_plane import MessageReceivingPlane, MessageSendingPlane
from tpla.workers.transfer.protocol import (
    Identity,
    IncomingStaging,
    Link,
    OutgoingStaging,
    Pages,
    ReceivingPlane,
    Reservation,
    Rows,
    SendingPlane,
)
from tpla.workers.transfer.pusher import Written
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.staging import HostIncoming, HostOutgoing
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

LAYERS, PAGE_SIZE, METADATA = 3, 4, b"first token!"
TIMEOUTS = TransferTimeouts(handshake=20, reserve=20, push=20, ack=20)


def identity(name: str, fingerprint: str = "f" * 64) -> Identity:
    return Identity(name, fingerprint, len(METADATA), kv_lora_rank=64, qk_rope_head_dim=16)


@dataclass
class Events:
    """Remembers what became of each room."""

    ready: set[int] = field(default_factory=set)
    done: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, TransferError] = field(default_factory=dict)

    def on_ready(self, room: int, decode_prefix_len: int) -> None:
        self.ready.add(room)

    def on_done(self, room: int, metadata: bytes) -> None:
        self.done[room] = metadata

    def on_failed(self, room: int, error: TransferError) -> None:
        self.failed[room] = error


class SourcePool:
    """Pages whose rows depend on page, layer and layout, so that a misplaced byte shows."""

    num_layers, page_size, device = LAYERS, PAGE_SIZE, torch.device("cpu")

    def read(self, pages: Pages, layout: CacheLayout) -> Rows:
        by_page = [expected_rows(int(page), layout) for page in pages]
        runs = zip(*by_page, strict=True)
        return np.concatenate([np.concatenate(rows, axis=1).reshape(-1) for rows in runs])

    def staging(self, layout: CacheLayout, nbytes: int) -> OutgoingStaging:
        return HostOutgoing(nbytes, lambda pages: self.read(pages, layout))


class Pool:
    """Remembers what is written to each page."""

    page_size, device = PAGE_SIZE, torch.device("cpu")

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.written: dict[int, list[np.ndarray]] = {}
        self.followed: list[tuple[torch.cuda.Event, int]] = []
        self.lock = threading.Lock()

    def staging(self, nbytes: int) -> IncomingStaging:
        return HostIncoming(nbytes, self.write)

    def follow(self, event: torch.cuda.Event) -> None:
        self.followed.append((event, len(self.written)))

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        if not intact():
            return False
        tokens = len(pages) * PAGE_SIZE
        runs = [rows[part].reshape(run.shape(tokens)) for run, part in self.layout.parts(tokens)]
        with self.lock:
            for index, page in enumerate(pages):
                span = slice(index * PAGE_SIZE, (index + 1) * PAGE_SIZE)
                self.written[int(page)] = [run_YTB[:, span].copy() for run_YTB in runs]
        return True


def expected_rows(page: int, layout: CacheLayout) -> list[np.ndarray]:
    """Rows of one page, ``[layers, PAGE_SIZE, row_bytes]`` of each run."""
    generator = np.random.default_rng([page, layout.group])
    shapes = [run.shape(PAGE_SIZE) for run in layout.runs]
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


class Rank:
    """One decode rank."""

    def __init__(
        self,
        kind: str,
        link: Link,
        group: int,
        groups: int,
        fingerprint: str,
        timeouts: TransferTimeouts,
        core_dims: tuple[int, ...],
    ) -> None:
        layout = CacheLayout(ModelPlan(64, groups, core_dims), group, 16, KVFormat.FP8)
        self.pool = Pool(layout)
        self.events = Events()
        self.lost: list[str] = []
        plane: ReceivingPlane = MessageReceivingPlane(link, self.pool)
        if kind == "gloo":
            plane = GroupReceivingPlane(self.pool, kind, timeouts)
        self.receiver = DecodeReceiver(
            link, plane, identity(f"d{group}", fingerprint), timeouts, self.events, self.lost.append
        )


class Pair:
    """One prefill rank and ``groups`` decode ranks; messages of ``gloo`` go over ZMQ."""

    def __init__(
        self,
        kind: str = "fake",
        groups: int = 2,
        fault: FaultPlan | None = None,
        decode_fingerprint: str = "f" * 64,
        timeouts: TransferTimeouts = TIMEOUTS,
        decode_kind: str = "",
        core_dims: tuple[int, ...] = (0,) * LAYERS,
    ) -> None:
        if kind == "fake":
            server: Link = FakeLink()
            self.endpoint = server.endpoint  # type: ignore[attr-defined]
            clients: list[Link] = [FakeLink(f"decode{rank}") for rank in range(groups)]
        else:
            zmq_server = ZmqServerLink("127.0.0.1")
            server, self.endpoint = zmq_server, f"tcp://127.0.0.1:{zmq_server.port}"
            clients = [ZmqClientLink(f"decode{rank}") for rank in range(groups)]
        self.events = Events()
        plane: SendingPlane = MessageSendingPlane(server, SourcePool())
        if kind == "gloo":
            plane = GroupSendingPlane(SourcePool(), kind, timeouts)
        if fault is not None:
            plane = FaultySendingPlane(plane, fault)
        self.sender = PrefillSender(server, plane, identity("p"), timeouts, self.events)
        self.ranks = [
            Rank(
                *(decode_kind or kind, client, group, groups),
                *(decode_fingerprint, timeouts, core_dims),
            )
            for group, client in enumerate(clients)
        ]

    def reserve(
        self, room: int, pages: list[int], ranks: list[Rank] | None = None, vacated: object = None
    ) -> None:
        wanted = np.array(pages, np.int32)
        for rank in ranks or self.ranks:
            rank.receiver.expect(room, [self.endpoint])
            rank.receiver.greet(self.endpoint)
            rank.receiver.reserve(
                room, Reservation(wanted, self.endpoint, (), len(self.ranks), 0, vacated)
            )

    def push(
        self,
        room: int,
        pages: list[int],
        start: int = 0,
        last: bool = True,
        written: Written | None = None,
    ) -> None:
        metadata = METADATA if last else None
        self.sender.push(room, start, np.array(pages, np.int32), metadata, written)

    def idle(self) -> bool:
        accounts = [self.sender.accounting(), *(r.receiver.accounting() for r in self.ranks)]
        return all(account["rooms"] == 0 for account in accounts)

    def close(self) -> None:
        self.sender.close()
        for rank in self.ranks:
            rank.receiver.close()


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
