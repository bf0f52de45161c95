"""What a benchmark's command line says."""

from __future__ import annotations

import shlex
import sys


def command_line(module: str) -> str:
    """The command that runs now, for a report's header, quoted as a shell takes it."""
    return shlex.join(["python", "-m", f"tpla.benchmarks.{module}", *sys.argv[1:]])


def parse_batch(text: str) -> tuple[int, int]:
    """``BATCHxCONTEXT``: requests, and tokens of each.

    Raises:
        ValueError: other text.
    """
    batch, context = map(int, text.split("x"))
    return batch, context
