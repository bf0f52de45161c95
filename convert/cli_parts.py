"""What the commands of this package share: dtypes, devices, progress bars, errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress as ProgressBar

from tpla.convert.pipeline import Progress
from tpla.core.errors import ConfigError, TplaError

PER_DOCUMENT = "each document of a .jsonl begins a new sequence, as chats are served"


class FloatType(str, Enum):
    """Float dtypes that options take."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


def parse_core_dims(text: str) -> int | tuple[int, ...]:
    """One number for all layers, or a comma-separated list with one for each.

    Raises:
        ConfigError: neither.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"core_dims={text!r}: give one number, or one for each layer as in 0,0,32"
        ) from error
    return numbers if len(numbers) > 1 else numbers[0]


def write_json(path: Path, document: object, indent: int | None = 2) -> None:
    """Write a result; ``indent=None`` puts it on one line.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(document, indent=indent) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="run the tokenizer's own code that lies in the checkpoint, as Kimi-K2's needs",
    ),
]


def check_json(path: Path | None) -> Path | None:
    """Check that :func:`write_json` could write a result, before the work for it begins.

    Raises:
        ConfigError: it could not.
    """
    if path is None:
        return None
    place = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"cannot write {path}; give a file in a folder that can be written to")
    return path


def check_device(name: str) -> str:
    """Check a device name.

    Raises:
        ConfigError: torch does not know it, or this machine lacks it.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"device={name!r} cannot be used: {first_line}") from error
    return name


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for each stage on stderr, gone when done."""
    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, object] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield advance


def run_app(app: typer.Typer) -> None:
    """Run a command; errors of the user end it with one line and status 2."""
    try:
        app()
    except TplaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
