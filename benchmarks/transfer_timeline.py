"""When what happens while KV is transferred between two GPUs, in both processes.

    python -m tpla.benchmarks.transfer_timeline [--context 128 --context 32768] [--json OUT]

The ranks of ``transfer_gpu``, with a clock that processes of a host share read before and after the
calls below. A row is the n-th time in a request that a call begins or returns: microseconds after
the push, the median of the repetitions. The clocks take some microseconds themselves.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tpla.benchmarks.command import command_line
from tpla.benchmarks.machine import describe_machine
from tpla.benchmarks.transfer_gpu import (
    SYSTEMS,
    WARM_UPS,
    PrefillRank,
    Setup,
    System,
    decode_process,
    prefill_pool,
)
from tpla.core.config.environment import NCCL_TRANSFER, put
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.workers.transfer.group_plane import GroupInbox, GroupOutbox
from tpla.workers.transfer.pair_channel import PairChannel
from tpla.workers.transfer.pair_group import GlooGroup, NcclGroup
from tpla.workers.transfer.pusher import Pusher
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender


@dataclass(frozen=True)
class Call:
    """A method whose begin and return are told; ``only`` a return that is worth it."""

    owner: type
    method: str
    name: str
    only: Callable[[Any], bool] = lambda returned: True


_COMMON = (
    Call(PairChannel, "send", "tell"),
    Call(PreparedLaunch, "__call__", "launch"),
    Call(NcclGroup, "_begin", "group"),
    Call(GlooGroup, "_begin", "group"),
)
PREFILL = (
    Call(PrefillSender, "push", "push"),
    Call(PrefillSender, "send_task", "task"),
    Call(GroupOutbox, "send", "chunk"),
    Call(GroupOutbox, "finish", "end of room"),
    Call(Pusher, "on_answer", "answer"),
    *_COMMON,
)
DECODE = (
    Call(PairChannel, "receive", "hear", only=bool),
    Call(GroupInbox, "_begin", "receive"),
    Call(DecodeReceiver, "on_rows", "store"),
    Call(DecodeReceiver, "on_stored", "verify"),
    Call(DecodeReceiver, "on_done", "end of room"),
    *_COMMON,
)

Mark = tuple[float, str, str, str]
"""Seconds of the shared clock, rank, call, and ``begins`` or ``returns``."""


def watch(calls: Iterable[Call], rank: str, marks: list[Mark]) -> Callable[[], None]:
    """Put clocks around ``calls`` of this process; returns what takes them off again."""
    undo = [_around(call, rank, marks) for call in calls]

    def stop() -> None:
        for each in undo:
            each()

    return stop


def _around(call: Call, rank: str, marks: list[Mark]) -> Callable[[], None]:
    inner = getattr(call.owner, call.method)

    @functools.wraps(inner)
    def watched(*arguments: Any, **named: Any) -> Any:
        begun = _now()
        returned = inner(*arguments, **named)
        if call.only(returned):
            marks.append((begun, rank, call.name, "begins"))
            marks.append((_now(), rank, call.name, "returns"))
        return returned

    setattr(call.owner, call.method, watched)
    return lambda: setattr(call.owner, call.method, inner)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _watched_decode(
    marks_path: Path, setup: Setup, system: System, port: int, pipe: Connection
) -> None:
    marks: list[Mark] = []
    watch(DECODE, "decode", marks)
    decode_process(setup, system, port, pipe)
    marks_path.write_text(json.dumps(marks))


def measure(setup: Setup, system: System) -> list[dict[str, Any]]:
    """Rows of every context, in the order of time."""
    marks: list[Mark] = []
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    stop = watch(PREFILL, "prefill", marks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "decode.json"
            decode = functools.partial(_watched_decode, path)
            prefill = PrefillRank(setup, system, prefill_pool(setup), decode)
            for context in setup.contexts:
                for repetition in range(WARM_UPS + setup.repetitions):
                    begun = _now()
                    prefill.migrate(setup.pages(context))
                    if repetition >= WARM_UPS:
                        spans[context].append((begun, _now()))
            prefill.close()
            marks += [tuple(mark) for mark in json.loads(path.read_text())]
    finally:
        stop()
    return [row for context in setup.contexts for row in rows_of(marks, spans[context], context)]


def rows_of(
    marks: Iterable[Mark], spans: Sequence[tuple[float, float]], context: int
) -> list[dict[str, Any]]:
    """Medians over requests, each of which lies within one span; what most requests had."""
    ordered, times = sorted(marks), defaultdict(list)
    for begun, ended in spans:
        push = next(mark[0] for mark in ordered if mark[0] >= begun and mark[2] == "push")
        seen: dict[tuple[str, ...], int] = defaultdict(int)
        for seconds, *what in (mark for mark in ordered if push <= mark[0] <= ended):
            seen[tuple(what)] += 1
            times[(*what, seen[tuple(what)])].append((seconds - push) * 1e6)
    rows = [
        {
            "benchmark": "transfer_timeline",
            "context": context,
            "us": statistics.median(each),
            "rank": rank,
            "call": call,
            "edge": edge,
            "number": number,
        }
        for (rank, call, edge, number), each in times.items()
        if len(each) > len(spans) // 2
    ]
    return sorted(rows, key=lambda row: row["us"])


def show(rows: list[dict[str, Any]], context: int) -> Table:
    """A line a row, either rank in a column of its own."""
    table = Table("µs after the push", "prefill", "decode", title=f"{context} tokens")
    for row in rows:
        if row["context"] == context:
            what = f"{row['call']} {row['number']} {row['edge']}"
            both = (what, "") if row["rank"] == "prefill" else ("", what)
            table.add_row(f"{row['us']:.0f}", *both)
    return table


def main(
    context: Annotated[list[int] | None, typer.Option(help="tokens of a request")] = None,
    repetitions: Annotated[int, typer.Option(help="requests of each context")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="file to write")] = None,
    commit: Annotated[str | None, typer.Option(help="of a copy without git")] = None,
) -> None:
    """Measure the first system of transfer_gpu, print tables, write JSON."""
    put(NCCL_TRANSFER)
    contexts = tuple(context or (128, 32768))
    rows = measure(Setup(contexts=contexts, repetitions=repetitions), SYSTEMS[0])
    for each in contexts:
        Console().print(show(rows, each))
    if json_path is not None:
        header = describe_machine(command_line("transfer_timeline"), commit)
        json_path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
