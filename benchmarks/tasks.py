"""Exact answers through the whole serving path, mode beside mode.

    python -m tpla.benchmarks.tasks --questions 20 --json OUT

Starts ``deploy/launch.sh`` once for each mode, one after the other, with one prefill worker and one
decode worker of two ranks, and asks each what ``tpla eval tasks`` asks.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from tpla.benchmarks.transfer import header
from tpla.convert.endpoint_tasks import Endpoint, EndpointResult, TaskSet, ask_endpoint
from tpla.convert.eval_cli import print_tasks
from tpla.workers.ports import free_ports

LAUNCH = Path(__file__).resolve().parents[1] / "deploy" / "launch.sh"
MODES = {
    "mla bf16": ("--mode", "mla"),
    "snapmla fp8": ("--mode", "snapmla"),
    "tpla g=2 fp8": ("--mode", "tpla"),
}
_START_SECONDS = 600
_STOP_SECONDS = 60


@contextmanager
def deployment(log: Path, *arguments: str) -> Iterator[str]:
    """Address of a running deployment, which ends with the block."""
    (port,) = free_ports(1)
    command = [str(LAUNCH), "--prefill", "1", "--decode", "2", "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/ready", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_STOP_SECONDS)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    sys.exit(f"{LAUNCH} does not serve:\n{log.read_text()[-4000:]}")


def main(
    questions: Annotated[int, typer.Option(help="of each kind and recall distance")] = 20,
    concurrency: Annotated[int, typer.Option(help="questions under way at once")] = 4,
    timeout: Annotated[float, typer.Option(help="seconds for one answer")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="file to write")] = None,
) -> None:
    """Ask every mode, print one table, write JSON."""
    tasks, results = TaskSet(questions), list[EndpointResult]()
    console = Console(stderr=True)
    for label, arguments in MODES.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            deployment(Path(folder) / "launch.log", *arguments) as url,
        ):
            console.print(f"{label}: {url}")
            endpoint = Endpoint(label, url)
            results.append(asyncio.run(ask_endpoint(endpoint, tasks, concurrency, timeout)))
    print_tasks(results)
    if json_path is not None:
        document = {"header": header(), "endpoints": [asdict(result) for result in results]}
        json_path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
