"""Converted models and worker sets that the end-to-end tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.servers import REPOSITORY, Worker
from tpla.convert.checkpoint_io import Checkpoint

REFERENCE_MODEL = REPOSITORY / "deploy" / "reference_model"


@dataclass(frozen=True)
class Conversions:
    """Converted copies of a model; PCA's rotation is one for all plans, so they share prefill."""

    directory: Path
    calibration: Path

    def of(self, source: Path, groups: int, core: str, method: str = "pca") -> Path:
        """``source`` converted for ``groups`` and ``core`` dims, made at most once.

        One in block FP8 keeps its format, others become float32.
        """
        target = self.directory / f"{source.name}-{method}-g{groups}-core{core}"
        if not target.exists():
            command = [sys.executable, "-m", "tpla.core.cli", "convert", str(source), str(target)]
            plan = ["--groups", str(groups), "--core-dims", core]
            plan += [] if Checkpoint(source).block_fp8 else ["--dtype", "float32"]
            text = ["--calibration", str(self.calibration), "--max-tokens", "8192"]
            basis = ["--method", method, "--learning-steps", "40"]
            subprocess.run([*command, *plan, *text, *basis], check=True, timeout=300)
        return target


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    directory = tmp_path_factory.mktemp("models")
    text = directory / "calibration.jsonl"
    command = [sys.executable, "-m", "tpla.convert.reference.text", "--out", str(text)]
    subprocess.run([*command, "--documents", "24"], check=True, timeout=120)
    return Conversions(directory, text)


StartWorker = Callable[..., Worker]


@contextmanager
def worker_set(logs: Path) -> Iterator[StartWorker]:
    """Start workers that live until the block ends; whole sets at once would exhaust memory."""
    started: list[Worker] = []

    def start(role: str, model: Path, *arguments: str) -> Worker:
        log = logs / f"{role}-{len(started)}.log"
        started.append(Worker(role, model, log, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.kill()
