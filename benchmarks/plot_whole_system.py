"""A report of whole systems as a picture.

    python -m tpla.benchmarks.plot_whole_system REPORT.json OUT.png

Over the rate that was asked for: good requests a second and GPU, TTFT, and time between tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

from tpla.benchmarks.load_sweep import Bounds

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def draw(rows: list[dict[str, Any]], bounds: Bounds, picture: Path) -> None:
    """Draw the rows of every system."""
    figure, (goodput, first, between) = plt.subplots(1, 3, figsize=(14, 4))
    for number, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        own = sorted((r for r in rows if r["system"] == system), key=lambda r: r["request_rate"])
        rates, colour = [r["request_rate"] for r in own], f"C{number}"
        values = [r["goodput_per_gpu"] for r in own]
        goodput.plot(rates, values, "o-", color=colour, label=system)
        _percentiles(first, rates, own, "ttft", system, colour)
        _percentiles(between, rates, own, "itl", system, colour)
    within = f"TTFT <= {bounds.ttft_ms:g} ms, TPOT <= {bounds.tpot_ms:g} ms"
    goodput.set(ylabel="good requests a second and GPU", title=within)
    goodput.set_ylim(bottom=0)
    first.set(ylabel="ms", yscale="log", title="TTFT")
    between.set(ylabel="ms", yscale="log", title="ITL")
    for axes in (goodput, first, between):
        axes.set_xlabel("requests a second")
        axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _percentiles(
    axes: Axes, rates: list[float], rows: list[dict[str, Any]], name: str, label: str, colour: str
) -> None:
    for share, style in ((50, "o-"), (99, "o:")):
        values = [row[f"{name}_ms_p{share}"] for row in rows]
        axes.plot(rates, values, style, color=colour, label=f"{label}, p{share}")


def main(
    report: Annotated[Path, typer.Argument(help="of python -m tpla.benchmarks.whole_system")],
    out: Annotated[Path, typer.Argument(help="picture to write")],
) -> None:
    """Draw a report."""
    document = json.loads(report.read_text())
    bounds = Bounds(document["header"]["ttft_ms"], document["header"]["tpot_ms"])
    draw(document["rows"], bounds, out)


if __name__ == "__main__":
    typer.run(main)
