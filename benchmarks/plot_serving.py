"""A serving report as a picture.

    python -m tpla.benchmarks.plot_serving REPORT.json OUT.png

A panel for each batch that was asked for: throughput of every system over the context (TTFT, where
prefill was measured), or a bar a system where there is one context.
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


def draw_lines(axes: Axes, rows: list[dict[str, Any]], figure: str) -> None:
    """One line a system over the context, for rows that asked for the same batch."""
    for system in dict.fromkeys(row["system"] for row in rows):
        own = sorted((r for r in rows if r["system"] == system), key=lambda r: r["context"])
        axes.plot([r["context"] for r in own], [r[figure] for r in own], "o-", label=system)
    axes.set(xscale="log", xlabel="tokens of context")
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
    axes.minorticks_off()
    axes.legend()


def draw_bars(axes: Axes, rows: list[dict[str, Any]], figure: str) -> None:
    """One bar a system with its figure and its batch, for rows of one context."""
    bars = axes.bar([row["system"] for row in rows], [row[figure] for row in rows])
    axes.bar_label(bars, [f"{row[figure]:.0f}\n({row['batch']})" for row in rows])
    axes.set_xlabel(f"{rows[0]['context'] // 1024}K tokens of context each (requests)")
    axes.margins(y=0.25)
    axes.tick_params("x", labelrotation=20)


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
    draw = draw_lines if len({row["context"] for row in rows}) > 1 else draw_bars
    picture, panels = plt.subplots(1, len(batches), figsize=(4.5 * len(batches), 4), squeeze=False)
    for axes, asked in zip(panels[0], batches, strict=True):
        draw(axes, [r for r in rows if r["batch_asked"] == asked], figure)
        axes.set(ylabel=label, title=f"batch {asked}" if asked else "largest batch")
        axes.set_ylim(bottom=0)
    picture.tight_layout()
    picture.savefig(out, dpi=120)
    plt.close(picture)


if __name__ == "__main__":
    typer.run(main)
