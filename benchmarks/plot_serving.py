"""A serving report as a picture.

    python -m tpla.benchmarks.plot_serving REPORT.json OUT.png

A panel for each batch that was asked for: throughput of every system over the context (TTFT, where
prefill was measured).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def draw_batch(axes: Axes, rows: list[dict[str, Any]], figure: str, label: str) -> None:
    """One line a system, for rows that asked for the same batch."""
    for system in dict.fromkeys(row["system"] for row in rows):
        own = sorted((r for r in rows if r["system"] == system), key=lambda r: r["context"])
        axes.plot([r["context"] for r in own], [r[figure] for r in own], "o-", label=system)
    asked = rows[0]["batch_asked"]
    axes.set(
        xscale="log",
        xlabel="tokens of context",
        ylabel=label,
        title=f"batch {asked}" if asked else "largest batch",
    )
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()


def main(
    report: Annotated[Path, typer.Argument(help="of python -m tpla.benchmarks.serving")],
    out: Annotated[Path, typer.Argument(help="picture to write")],
) -> None:
    """Draw a report."""
    rows = json.loads(report.read_text())["rows"]
    prefill = rows[0]["benchmark"] == "prefill"
    figure, label = (
        ("ttft_ms", "ms to the first token") if prefill else ("tokens_per_s", "tokens a second")
    )
    batches = sorted({row["batch_asked"] for row in rows}, key=lambda asked: (asked == 0, asked))
    picture, panels = plt.subplots(1, len(batches), figsize=(4.5 * len(batches), 4), squeeze=False)
    for axes, asked in zip(panels[0], batches, strict=True):
        draw_batch(axes, [r for r in rows if r["batch_asked"] == asked], figure, label)
    picture.tight_layout()
    picture.savefig(out, dpi=120)
    plt.close(picture)


if __name__ == "__main__":
    typer.run(main)
