"""Roofline and peers of a kernel report, as a picture, and its table, printed in Markdown.

    python -m tpla.benchmarks.plot_kernels benchmarks/results/kernels_h200.json OUT.png

Left: each case at its arithmetic intensity (operations a byte that must be read), under the
ceilings that the same run measured. Right: the largest batch beside its peers, in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_MARKS = {"fp8": "o", "bf16": "s"}
_PEERS = ("flashmla_bf16", "flashmla_fp8")
_TABLE_PEERS = {
    "flashmla_bf16": "FlashMLA bf16",
    "flashmla_fp8": "FlashMLA fp8",
    "sglang_triton_bf16": "SGLang Triton bf16",
}


def draw_roofline(axes: Axes, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """TFLOP/s over operations a byte, log-log."""
    intensity = np.geomspace(20, 1000, 200)
    memory = intensity * header["copy_gb_per_s"] / 1e3
    for name, style in (("fp8_tflops", "-"), ("bf16_tflops", "--")):
        axes.plot(intensity, np.minimum(memory, header[name]), style, color="grey",
                  label=f"{name.split('_')[0]} ceiling {header[name]:.0f} TFLOP/s")  # fmt: skip
    for batch, context in sorted({(row["batch"], row["context"]) for row in rows}):
        for kv_format, mark in _MARKS.items():
            points = [
                row
                for row in rows
                if (row["batch"], row["context"], row["kv_format"]) == (batch, context, kv_format)
            ]
            axes.plot([1e3 * row["tflops"] / row["gb_per_s"] for row in points],
                      [row["tflops"] for row in points], mark, alpha=0.7,
                      label=f"{batch} x {context // 1024}K {kv_format}")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"{header['gpu']}, copy {header['copy_gb_per_s']:.0f} GB/s")
    axes.legend(fontsize=7)


def draw_peers(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Microseconds of the case with most cached tokens, beside the peers that were measured."""
    most = max(row["batch"] * row["context"] for row in rows)
    chosen = [
        row
        for row in rows
        if row["batch"] * row["context"] == most and row["model"] == "DeepSeek-V3"
    ]
    place = np.arange(len(chosen))
    axes.bar(place - 0.27, [row["us"] for row in chosen], 0.26, label="this kernel")
    measured = [name for name in _PEERS if any(name in row["peers"] for row in chosen)]
    for offset, name in enumerate(measured):
        times = [row["peers"].get(name, {}).get("us", np.nan) for row in chosen]
        axes.bar(place + 0.27 * offset, times, 0.26, label=name)
    labels = [
        f"TP{row['tp']} g={row['groups']}\n{row['kv_format']}\nPV {row['pv_format']}"
        for row in chosen
    ]
    axes.set_xticks(place, labels, fontsize=7)
    axes.set_ylabel("µs")
    axes.margins(y=0.25)  # room for the legend above the bars
    axes.set_title(f"DeepSeek-V3, {chosen[0]['batch']} x {chosen[0]['context'] // 1024}K tokens")
    axes.legend(fontsize=7)


def table(rows: list[dict[str, Any]], model: str) -> str:
    """Markdown of one model's rows; a peer's time, and how many times longer it takes."""
    titles = ("case", "P V", "heads", "latent", "batch", "µs", "GB/s", "TFLOP/s", "% of roofline")
    lines = [" | ".join(("", *titles, *_TABLE_PEERS.values(), "")).strip()]
    lines.append("|" + "---|" * (len(titles) + len(_TABLE_PEERS)))
    for row in rows:
        if row["model"] != model:
            continue
        case = f"TP{row['tp']} g={row['groups']} {row['kv_format']}"
        figures = (row[name] for name in ("us", "gb_per_s", "tflops", "roofline_pct"))
        batch = f"{row['batch']} x {row['context'] // 1024}K"
        cells = [case, row["pv_format"], row["heads"], row["latent"], batch]
        cells += [f"{figure:.0f}" for figure in figures]
        for name in _TABLE_PEERS:
            peer = row["peers"].get(name)
            cells.append(f"{peer['us']:.0f} ({peer['ratio']:.2f}x)" if peer else "-")
        lines.append(" | ".join(("", *map(str, cells), "")).strip())
    return "\n".join(lines)


def main(
    report: Annotated[Path, typer.Argument(help="JSON of tpla.benchmarks.kernels")],
    picture: Annotated[Path, typer.Argument(help="file to write")],
) -> None:
    """Draw both panels, print DeepSeek-V3's table."""
    document = json.loads(report.read_text())
    rows = [row for row in document["rows"] if row["us"] is not None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    draw_roofline(left, document["header"], rows)
    draw_peers(right, rows)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    print(table(rows, "DeepSeek-V3"))


if __name__ == "__main__":
    typer.run(main)
