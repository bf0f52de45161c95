"""A report on several systems, of which one that fails does not end the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer


@dataclass
class SystemsReport:
    """What was measured, in a file that is whole after every row: a night's run may be cut off.

    Attributes:
        out: the file.
        header: what the figures belong to.
        rows: dataclasses, in the order in which they were measured.
        failed: why a system was given up, by its name.
    """

    out: Path
    header: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, row: Any) -> None:
        """Append a row, and write."""
        self.rows.append(row)
        self.save()

    def plain_rows(self) -> list[dict[str, Any]]:
        """The rows as they stand in the file."""
        return [asdict(row) for row in self.rows]

    def save(self) -> None:
        """Write the file anew."""
        whole = {"header": self.header, "rows": self.plain_rows(), "failed": self.failed}
        self.out.write_text(json.dumps(whole, indent=1) + "\n")

    def measure_all(
        self,
        names: Iterable[str],
        measure: Callable[[str], None],
        failures: tuple[type[Exception], ...],
    ) -> None:
        """Measure system after system; one that raises one of ``failures`` is noted and left."""
        for name in names:
            try:
                measure(name)
            except failures as error:
                self.failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        self.save()

    def exit_if_failed(self) -> None:
        """End the command with status 1 where a system failed."""
        if self.failed:
            raise typer.Exit(1)
