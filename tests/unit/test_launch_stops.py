"""What a launch does when it is told to stop, while it converts too: real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.sglang_worker import wait_until

LAUNCH = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tpla.workers import launch_cli
command = (sys.executable, "-c", *sys.argv[2:])
launch_cli._convert(SimpleNamespace(state=Path(sys.argv[1])), SimpleNamespace(conversion=[command]))
"""

WATCH = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tpla.workers import launch_cli
launch_cli._start = lambda *_: Path(sys.argv[1], "started").touch()
launch_cli._run(SimpleNamespace(state=Path(sys.argv[1])), None, 5)
"""

CONVERSION = """
import signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
folder.mkdir()
try:
    time.sleep(60)
finally:
    time.sleep(seconds)
    folder.rmdir()
"""
"""Takes a moment to remove what it has half written, as one of many files does."""

Start = Callable[[float], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launch whose conversion has begun, and takes so many seconds to clean up."""
    started = []

    def begin(seconds: float) -> subprocess.Popen[bytes]:
        words = [str(tmp_path), CONVERSION, str(tmp_path / "out.tmp"), str(seconds)]
        command = [sys.executable, "-c", LAUNCH, *words]
        launch = subprocess.Popen(command, start_new_session=True, preexec_fn=hear_hangups)
        started.append(launch)
        wait_until((tmp_path / "out.tmp").exists, 30)
        return launch

    yield begin
    for launch in started:
        launch.kill()
        launch.wait(20)


def hear_hangups() -> None:
    """Also where these tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_stopped_leaves_nothing_in_the_way_of_the_next(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    launch = start(1)
    # A terminal tells all of its foreground processes, a container's runtime the first one alone.
    os.killpg(launch.pid, number) if number == signal.SIGINT else launch.send_signal(number)
    assert launch.wait(30) == 128 + number
    assert not (tmp_path / "out.tmp").exists()


def test_a_second_signal_does_not_wait_for_it(start: Start, tmp_path: Path) -> None:
    launch = start(60)
    launch.terminate()
    time.sleep(0.2)
    launch.terminate()
    assert launch.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "out.tmp").exists()


@pytest.mark.parametrize("nohup", [False, True])
def test_only_without_nohup_the_end_of_a_terminal_is_that_of_a_launch(
    tmp_path: Path, nohup: bool
) -> None:
    words = [*(["nohup"] if nohup else []), sys.executable, "-c", WATCH, str(tmp_path)]
    launch = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hear_hangups
    )
    try:
        wait_until((tmp_path / "started").exists, 30)
        launch.send_signal(signal.SIGHUP)
        if nohup:
            with pytest.raises(subprocess.TimeoutExpired):
                launch.wait(2)
            launch.terminate()
        assert launch.wait(30) == 0
    finally:
        launch.kill()
        launch.wait(20)
