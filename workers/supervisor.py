"""Runs a deployment: starts its processes, restarts those that die, stops every one at the end."""

from __future__ import annotations

import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from tpla.core.errors import TplaError
from tpla.workers.deployment import ProcessPlan

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
_POLL_TIMEOUT_SECONDS = 2.0
_TERM_PATIENCE_SECONDS = 8.0
_KILL_PATIENCE_SECONDS = 5.0
_CLEANING_PATIENCE_SECONDS = 60.0
_RESTART_WAIT_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_HEALTHY_AFTER_SECONDS = 60.0


class StartFailed(TplaError):
    """A process ended, or did not serve in time, while the deployment was starting."""


@dataclass
class _Running:
    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    restarts: int = 0
    restart_at: float | None = None


class Supervisor:
    """Owns the processes of one deployment."""

    def __init__(self, log_directory: Path, console: Console) -> None:
        self._logs = log_directory
        self._console = console
        self._running: list[_Running] = []
        self._stop_requested = False
        log_directory.mkdir(parents=True, exist_ok=True)

    def request_stop(self) -> None:
        """Ask :meth:`wait_ready` and :meth:`watch` to return."""
        self._stop_requested = True

    def start(self, plan: ProcessPlan) -> None:
        """Start one process; its output goes to a log file."""
        log = self._logs / f"{plan.name}.log"
        log.unlink(missing_ok=True)
        self._running.append(_Running(plan, _spawn(plan, log), log, time.monotonic()))

    def wait_ready(self, timeout: float, progress: Callable[[str], None]) -> bool:
        """Wait until every process answers at its URL.

        Returns:
            Whether they do; not where a stop was requested first.

        Raises:
            StartFailed: one ended or none answered in time; carries the end of its log.
        """
        deadline = time.monotonic() + timeout
        waiting = list(self._running)
        # One client for all polls: making one loads every certificate of the system.
        with httpx.Client(timeout=_POLL_TIMEOUT_SECONDS, trust_env=False) as client:
            self._poll_until_ready(client, waiting, deadline, timeout, progress)
        return not self._stop_requested

    def _poll_until_ready(
        self,
        client: httpx.Client,
        waiting: list[_Running],
        deadline: float,
        timeout: float,
        progress: Callable[[str], None],
    ) -> None:
        while waiting and not self._stop_requested:
            progress(", ".join(item.plan.name for item in waiting))
            self._raise_if_one_ended()
            for item in list(waiting):
                if _answers(client, item.plan.ready_url):
                    waiting.remove(item)
            if waiting and time.monotonic() > deadline:
                raise StartFailed(
                    f"{waiting[0].plan.name} does not serve after {timeout:g} s; raise "
                    f"--start-timeout, or look here:\n{tail(waiting[0].log)}"
                )
            time.sleep(_POLL_SECONDS)
        if not self._stop_requested:
            self._raise_if_one_ended()

    def _raise_if_one_ended(self) -> None:
        """Those that seem to serve, too: another process may answer at the URL of one that ended.

        Raises:
            StartFailed: carries the end of its log.
        """
        for item in self._running:
            if item.process.poll() is not None:
                raise StartFailed(
                    f"{item.plan.name} ended with status {item.process.returncode}:\n"
                    f"{tail(item.log)}"
                )

    def watch(self) -> None:
        """Restart what dies until a stop is requested."""
        while not self._stop_requested:
            for item in self._running:
                self._revive(item)
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End every process and whatever it started, the router first."""
        for item in reversed(self._running):
            item.restart_at = None
        families = [_family(item.process.pid) for item in reversed(self._running)]
        for family in families:
            for process in family[:1]:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        everyone = [process for family in families for process in family]
        _, alive = psutil.wait_procs(everyone, timeout=_TERM_PATIENCE_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_KILL_PATIENCE_SECONDS)
        for item in self._running:
            item.process.wait(_KILL_PATIENCE_SECONDS)
        self._running.clear()

    def _revive(self, item: _Running) -> None:
        now = time.monotonic()
        if item.process.poll() is None:
            if now - item.started > _HEALTHY_AFTER_SECONDS:
                item.restarts = 0
            return
        if item.restart_at is None:
            wait = _RESTART_WAIT_SECONDS[min(item.restarts, len(_RESTART_WAIT_SECONDS) - 1)]
            item.restart_at = now + wait
            self._console.print(
                f"[red]{item.plan.name} ended[/] with status {item.process.returncode}; "
                f"starting it again in {wait:g} s (log: {item.log})"
            )
        elif now >= item.restart_at:
            item.process = _spawn(item.plan, item.log)
            item.started, item.restart_at = now, None
            item.restarts += 1


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    with suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def printable(plan: ProcessPlan) -> str:
    """A process's command as a user would type it."""
    return "tpla " + shlex.join(plan.command[plan.command.index("tpla.core.cli") + 1 :])


def _spawn(plan: ProcessPlan, log: Path) -> subprocess.Popen[bytes]:
    # Appended to: in a log that is rotated by truncating it, others go on at their old offset.
    with log.open("ab") as output:
        return subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone
            preexec_fn=die_with_parent,
        )


def stop_signals() -> list[signal.Signals]:
    """Signals that end a launch; not those that nohup has it ignore, to outlive its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def run_to_its_end(command: Sequence[str]) -> int:
    """Run a command that removes what it has half made when it is told to stop, and wait for it.

    A stop of this process is passed on to it; it is killed at a second one, or after a minute.

    Returns:
        Its exit status.

    Raises:
        SystemExit: this process was told to stop, and the command has ended.
    """
    asked: list[tuple[int, float]] = []

    def stop(number: int, _: object) -> None:
        child.kill() if asked else child.terminate()
        asked.append((number, time.monotonic()))

    child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
    before = {each: signal.signal(each, stop) for each in stop_signals()}
    try:
        while (status := child.poll()) is None:
            if asked and time.monotonic() - asked[0][1] > _CLEANING_PATIENCE_SECONDS:
                child.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if asked:
        sys.exit(128 + asked[0][0])
    return status


def die_with_parent() -> None:
    """A launch that is killed must leave no process behind; for ``preexec_fn``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False
