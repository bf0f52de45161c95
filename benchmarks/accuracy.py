"""What decode loses against the bytes that a rank caches, plan by plan.

    python -m tpla.benchmarks.accuracy --calibration TRAIN --text HELD_OUT --json OUT --plot OUT.png

Each plan, ``groups:core_dims`` with one number or one for each layer, is converted in each variant,
``method:alignment``, and evaluated with FP8 rows after an exact prefill of half the context.
Figures: KL to exact MLA, perplexity, agreement; bytes of a row on one rank, mean over the layers,
and as a share of the whole latent's FP8 row.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tpla.benchmarks.transfer import header
from tpla.convert.alignment import Alignment
from tpla.convert.cli_parts import parse_core_dims
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.report_plots import draw_error_against_bytes
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import Mode
from tpla.convert.text import load_tokenizer, read_sequences
from tpla.core.checkpoint import REFERENCE_MODEL
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan, describe_core

PLANS = ["2:0", "2:16", "2:32", "4:32", "4:48", "8:40", "8:48"]
VARIANTS = ["pca:none", "pca:values"]
_COLUMNS = (
    "groups",
    "core_dims",
    "method",
    "alignment",
    "row_bytes",
    "row_share",
    "kl",
    "ppl",
    "top1",
)


def measure(
    model: Path, options: ConversionOptions, text: Path, context: int, max_tokens: int
) -> dict[str, Any]:
    """Convert ``model`` and evaluate decode after half a context of exact prefill."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = convert_checkpoint(model, Path(folder) / "converted", options)
        subject = Subject(Path(folder) / "converted")
        tokenizer = load_tokenizer(model)
        sequences = read_sequences(text, tokenizer, context, max_tokens, False)
        spec = subject.spec(Mode.TPLA, KVFormat.FP8, context // 2)
        (row,) = evaluate_specs(subject, sequences, [spec], context)
    rope = int(subject.model.config.qk_rope_head_dim)
    plan = manifest.plan
    sliced = CacheLayout(plan, 0, rope, KVFormat.FP8)
    unsliced = ModelPlan(plan.kv_lora_rank, 1, (0,) * plan.num_layers)
    whole = CacheLayout(unsliced, 0, rope, KVFormat.FP8)
    return {
        **asdict(row),
        "row_bytes": sliced.token_bytes / plan.num_layers,
        "row_share": sliced.token_bytes / whole.token_bytes,
        "latent_share": plan.latent_share,
    }


def main(
    calibration: Annotated[Path, typer.Option(help="text to convert with")],
    text: Annotated[Path, typer.Option(help="text to evaluate on")],
    model: Annotated[Path, typer.Option(help="checkpoint to convert")] = REFERENCE_MODEL,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="GROUPS:CORE_DIMS, one number or a comma-separated list; repeatable"),
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="METHOD:ALIGNMENT, repeatable")] = None,
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    calibration_tokens: Annotated[int, typer.Option(help="to convert with, at most")] = 16384,
    max_tokens: Annotated[int, typer.Option(help="to evaluate on, at most")] = 6144,
    json_path: Annotated[Path | None, typer.Option("--json", help="file to write")] = None,
    plot: Annotated[Path | None, typer.Option(help="picture to write")] = None,
) -> None:
    """Measure every plan in every variant."""
    console, rows = Console(), []
    plans = [each.split(":") for each in plan or PLANS]
    variants = [each.split(":") for each in variant or VARIANTS]
    work = [(plan, variant) for plan in plans for variant in variants]
    for (groups, core_dims), (method, alignment) in track(work, "plans", console=console):
        options = ConversionOptions(
            groups=int(groups),
            core_dims=parse_core_dims(core_dims),
            method=Method(method),
            calibration=calibration,
            max_tokens=calibration_tokens,
            context=context,
            dtype=torch.float32,
            alignment=Alignment(alignment),
        )
        rows.append(measure(model, options, text, context, max_tokens))
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in _COLUMNS))
    console.print(table)
    if json_path is not None:
        document = {"header": header(), "model": model.name, "rows": rows}
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if plot is not None:
        draw_error_against_bytes(rows, plot)


def _cell(name: str, value: Any) -> str:
    if name == "core_dims":
        return describe_core(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
