"""What decode loses against the bytes that a rank caches, plan by plan.

    python -m tpla.benchmarks.accuracy --calibration TRAIN --text HELD_OUT --json OUT --plot OUT.png

Each plan is converted in each variant, ``METHOD:ALIGNMENT``, and evaluated with FP8 rows after an
exact prefill of half the context. ``METHOD:ALIGNMENT:averaged`` averages the core's values over the
groups where decode counts them in one, and begins the fit of values there; nothing serves it.

A plan is ``GROUPS:CORE_DIMS``, with one number or one for each layer, or ``GROUPS:<=BYTES``, what
``tpla convert --bytes-per-token BYTES`` chooses.

Figures: KL to exact MLA, perplexity and the exact model's, agreement; bytes of a row on one rank,
mean over the layers, and as a share of the whole latent's FP8 row. ``--questions``, for models of
``convert/reference``, adds shares of held-out questions that decode answers exactly after an exact
prefill: ``--recall-questions`` over ``--recall-distance`` tokens, and the mean of the other tasks.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tpla.benchmarks.command import command_line
from tpla.benchmarks.machine import describe_machine
from tpla.convert.alignment import Alignment
from tpla.convert.cli_parts import check_device, parse_core_dims
from tpla.convert.division import choose_plan
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.forced_answers import Exchange, encode_exchange, exact_answers
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import Budget
from tpla.convert.reference.questions import TASK_KINDS, recall_questions, task_questions
from tpla.convert.report_plots import draw_error_against_bytes
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import CoreValues, DecodeSpec, Mode
from tpla.convert.text import count_tokens, load_tokenizer, read_sequences
from tpla.core.checkpoint import REFERENCE_MODEL
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan, describe_core

PLANS = ["2:0", "2:16", "2:32", "4:32", "4:48", "8:40", "8:48"]
VARIANTS = ["pca:none", "pca:values"]
_COLUMNS = (
    "groups",
    "core_dims",
    "method",
    "alignment",
    "core_values",
    "row_bytes",
    "latent_share",
    "kl",
    "ppl",
    "exact_ppl",
    "top1",
    "seconds",
)


@dataclass(frozen=True)
class Held:
    """What plans are judged by.

    Attributes:
        text: held-out text.
        context: tokens of a sequence.
        max_tokens: of the text, at most.
        questions: of each task; 0: none are asked, nor of recall.
        recall_questions: of recall; None: as many as of a task.
        recall_distance: tokens between a fact and the question about it.

    Raises:
        ConfigError: a number of recall questions where none are asked.
    """

    text: Path
    context: int
    max_tokens: int
    questions: int = 0
    recall_questions: int | None = None
    recall_distance: int = 3000

    def __post_init__(self) -> None:
        if self.recall_questions is not None and not self.questions:
            raise ConfigError(
                f"recall_questions={self.recall_questions} with questions=0, which asks none; "
                "give --questions, too"
            )

    @property
    def recalls(self) -> int:
        """Questions of recall."""
        return self.questions if self.recall_questions is None else self.recall_questions


@dataclass(frozen=True)
class Asked:
    """Held-out questions with their answers; of each task the same number."""

    tasks: list[Exchange]
    recall: list[Exchange]


def encode_questions(model: Path, held: Held) -> Asked | None:
    """The questions that every plan is asked, None if there are none."""
    if not held.questions:
        return None
    tokenizer = load_tokenizer(model)
    tasks = [q for kind in TASK_KINDS for q in task_questions(kind, held.questions)]
    recall = recall_questions(partial(count_tokens, tokenizer), held.recall_distance, held.recalls)
    encoded = ([encode_exchange(tokenizer, q) for q in part] for part in (tasks, recall))
    return Asked(*encoded)


def measure(
    model: Path, options: ConversionOptions, held: Held, asked: Asked | None
) -> dict[str, Any]:
    """Convert ``model`` and evaluate decode after an exact prefill."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        manifest = convert_checkpoint(model, Path(folder) / "converted", options)
        subject = Subject(Path(folder) / "converted", options.device)
        sequences = read_sequences(
            held.text, load_tokenizer(model), held.context, held.max_tokens, False
        )
        spec = subject.spec(Mode.TPLA, KVFormat.FP8, held.context // 2)
        spec = replace(spec, core_values=options.core_values)
        exact = subject.spec(Mode.MLA, KVFormat.FP32, held.context // 2)
        row, exact_row = evaluate_specs(subject, sequences, [spec, exact], held.context)
        answers = {} if asked is None else _answers(subject, spec, held, asked)
    return {
        **asdict(row),
        "exact_ppl": exact_row.ppl,
        "core_values": options.core_values.value,
        **_bytes(manifest.plan, int(subject.model.config.qk_rope_head_dim)),
        **answers,
        "calibration_tokens": options.max_tokens,
        "learning_steps": options.learning_steps,
        "seconds": round(time.monotonic() - started, 1),
    }


def _bytes(plan: ModelPlan, rope: int) -> dict[str, float]:
    sliced = CacheLayout(plan, 0, rope, KVFormat.FP8)
    unsliced = ModelPlan(plan.kv_lora_rank, 1, (0,) * plan.num_layers)
    whole = CacheLayout(unsliced, 0, rope, KVFormat.FP8)
    return {
        "row_bytes": sliced.token_bytes / plan.num_layers,
        "row_share": sliced.token_bytes / whole.token_bytes,
        "latent_share": plan.latent_share,
    }


def _answers(subject: Subject, spec: DecodeSpec, held: Held, asked: Asked) -> dict[str, float]:
    """Shares of exact answers, of the model itself and of decode."""
    tasks = exact_answers(subject, asked.tasks, spec)
    recall = exact_answers(subject, asked.recall, spec)
    return {
        "questions": held.questions,
        "recall_questions": held.recalls,
        "recall_distance": held.recall_distance,
        "exact_recall": mean(exact for exact, _ in recall),
        "recall": mean(decoded for _, decoded in recall),
        "exact_tasks": mean(exact for exact, _ in tasks),
        "tasks": mean(decoded for _, decoded in tasks),
    }


def with_plan(model: Path, options: ConversionOptions, plan: str) -> ConversionOptions:
    """The options with a plan as the command line names it."""
    groups, _, core_dims = plan.partition(":")
    options = replace(options, groups=int(groups))
    if core_dims.startswith("<="):
        budget = Budget(bytes_per_token=int(core_dims[2:]))
        return replace(options, core_dims=choose_plan(model, options, budget).chosen.plan.core_dims)
    return replace(options, core_dims=parse_core_dims(core_dims))


def with_variant(options: ConversionOptions, variant: str) -> ConversionOptions:
    """The options with ``METHOD:ALIGNMENT`` or ``METHOD:ALIGNMENT:CORE_VALUES``."""
    method, alignment, *core_values = variant.split(":")
    return replace(
        options,
        method=Method(method),
        alignment=Alignment(alignment),
        core_values=CoreValues(*core_values or [CoreValues.COUNTED]),
    )


def main(
    calibration: Annotated[Path, typer.Option(help="text to convert with")],
    text: Annotated[Path, typer.Option(help="text to evaluate on")],
    model: Annotated[Path, typer.Option(help="checkpoint to convert")] = REFERENCE_MODEL,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="GROUPS:CORE_DIMS, or GROUPS:<=BYTES of a row; repeatable"),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="METHOD:ALIGNMENT[:averaged], repeatable")
    ] = None,
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    calibration_context: Annotated[
        int | None, typer.Option(help="tokens of a calibration sequence, if not the same")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="to convert with, at most")] = 16384,
    max_tokens: Annotated[int, typer.Option(help="to evaluate on, at most")] = 6144,
    learning_steps: Annotated[
        int | None, typer.Option(help="of a learned basis, if not the default")
    ] = None,
    questions: Annotated[int, typer.Option(help="of each kind, for reference models")] = 0,
    recall_questions: Annotated[
        int | None, typer.Option(min=1, help="of recall, if not --questions; those take longest")
    ] = None,
    recall_distance: Annotated[int, typer.Option(help="tokens from a fact to its question")] = 3000,
    device: Annotated[str, typer.Option(help="where to compute")] = "cpu",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="file to write, anew after every row")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="picture to write")] = None,
) -> None:
    """Measure every plan in every variant."""
    held = Held(text, context, max_tokens, questions, recall_questions, recall_distance)
    options = ConversionOptions(
        calibration=calibration,
        max_tokens=calibration_tokens,
        context=calibration_context or context,
        dtype=torch.float32,
        device=check_device(device),
    )
    if learning_steps is not None:
        options = replace(options, learning_steps=learning_steps)
    header, rows = describe_machine(command_line("accuracy")), []
    asked = encode_questions(model, held)
    for each in plan or PLANS:
        planned = with_plan(model, options, each)
        for chosen in variant or VARIANTS:
            rows.append(measure(model, with_variant(planned, chosen), held, asked))
            typer.echo("  ".join(_cell(name, rows[-1][name]) for name in _COLUMNS), err=True)
            if json_path is not None:
                document = {"header": header, "model": model.name, "rows": rows}
                json_path.write_text(json.dumps(document, indent=1) + "\n")
    print_rows(rows)
    if plot is not None:
        draw_error_against_bytes(rows, plot)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One table of all rows."""
    columns = list(_COLUMNS)
    if "recall" in rows[0]:
        columns += ["exact_recall", "recall", "exact_tasks", "tasks"]
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in columns))
    Console().print(table)


def _cell(name: str, value: Any) -> str:
    if name == "core_dims":
        return describe_core(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
