"""``tpla eval``: what decoding with a sliced or quantised latent loses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tpla.convert import evaluate as evaluation
from tpla.convert.cli_parts import (
    PER_DOCUMENT,
    FloatType,
    TrustRemoteCode,
    check_device,
    check_json,
    progress_bar,
    run_app,
    write_json,
)
from tpla.convert.endpoint_tasks import (
    Endpoint,
    EndpointResult,
    TaskSet,
    ask_endpoint,
    check_comparable,
    load_results,
)
from tpla.convert.eval_detail import Detail, evaluate_detail
from tpla.convert.forced_tasks import ask_checkpoint
from tpla.convert.sliced_attention import DecodeSpec, Mode
from tpla.convert.spectrum import Spectrum
from tpla.core.checkpoint import Manifest
from tpla.core.latent_layout import KVFormat, PVFormat, describe_core

_ENERGIES = (90, 99, 99.9)
"""Per cent of a layer's energy that ``tpla eval spectrum`` gives the dims of."""

_eval_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Measure what decoding with a sliced or quantised latent loses.",
)


def evaluate() -> None:
    """Run ``tpla eval``; errors of the user end it with one line and status 2."""
    run_app(_eval_app)


_Model = Annotated[Path, typer.Argument(help="converted checkpoint, or a plain one for mla")]
_Text = Annotated[Path, typer.Option(help='text file, or .jsonl with "text" or "messages"')]
_Context = Annotated[int, typer.Option(help="tokens of a sequence")]
_Json = Annotated[
    Path | None, typer.Option("--json", callback=check_json, help="write the result here")
]
_MaxTokens = Annotated[int, typer.Option(help="tokens of text at most")]
_PerDocument = Annotated[bool, typer.Option("--per-document", help=PER_DOCUMENT)]
_Mode = Annotated[Mode, typer.Option(help="attention of decode")]
_KVFormat = Annotated[KVFormat, typer.Option(help="format of the cache")]
_PVFormat = Annotated[PVFormat, typer.Option(help="how fp8 rows are added up")]
_Device = Annotated[str, typer.Option(help="where to compute")]
_Dtype = Annotated[FloatType, typer.Option(help="dtype in which to compute")]


@_eval_app.command("ppl")
def _ppl(
    model: _Model,
    text: _Text,
    mode: _Mode = Mode.TPLA,
    kv_format: _KVFormat = KVFormat.FP32,
    pv_format: _PVFormat = PVFormat.FP16,
    context: _Context = 2048,
    prefill: Annotated[
        int, typer.Option(help="positions below it are prefilled exactly and not scored")
    ] = 0,
    score_from: Annotated[
        int | None, typer.Option(help="first position that is scored (default: prefill)")
    ] = None,
    out: _Json = None,
    max_tokens: _MaxTokens = 65536,
    per_document: _PerDocument = False,
    device: _Device = "cpu",
    dtype: _Dtype = FloatType.FLOAT32,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Perplexity, KL from the exact model and top-1 agreement of one way to decode."""
    subject = evaluation.Subject(model, check_device(device), dtype.torch)
    sequences = subject.sequences(text, context, max_tokens, per_document, trust_remote_code)
    specs = [subject.spec(mode, kv_format, prefill, score_from, pv_format=pv_format)]
    (row,) = _measure(subject, sequences, specs, context)
    if out is not None:
        write_json(out, asdict(row))


@_eval_app.command("table")
def _table(
    model: _Model,
    text: _Text,
    context: _Context = 2048,
    out: _Json = None,
    max_tokens: _MaxTokens = 65536,
    per_document: _PerDocument = False,
    device: _Device = "cpu",
    dtype: _Dtype = FloatType.FLOAT32,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """MLA, GLA and TPLA; decode from the first token, and after a prefill of half the context.

    Every row scores the second half.
    """
    subject = evaluation.Subject(model, check_device(device), dtype.torch)
    sequences = subject.sequences(text, context, max_tokens, per_document, trust_remote_code)
    specs = evaluation.table_specs(subject, context)
    rows = _measure(subject, sequences, specs, context)
    if out is not None:
        write_json(out, [asdict(row) for row in rows])


@_eval_app.command("detail")
def _detail(
    model: _Model,
    text: _Text,
    mode: _Mode = Mode.TPLA,
    kv_format: _KVFormat = KVFormat.FP8,
    pv_format: _PVFormat = PVFormat.FP16,
    context: _Context = 2048,
    prefill: Annotated[
        int | None,
        typer.Option(help="positions below it are prefilled exactly (default: half the context)"),
    ] = None,
    out: _Json = None,
    max_tokens: _MaxTokens = 65536,
    per_document: _PerDocument = False,
    device: _Device = "cpu",
    dtype: _Dtype = FloatType.FLOAT32,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Agreement by position and by the distance attended over, and the error of each layer."""
    subject = evaluation.Subject(model, check_device(device), dtype.torch)
    sequences = subject.sequences(text, context, max_tokens, per_document, trust_remote_code)
    start = context // 2 if prefill is None else prefill
    spec = subject.spec(mode, kv_format, start, pv_format=pv_format)
    with progress_bar() as progress:
        detail = evaluate_detail(subject, sequences, spec, progress)
    _print_detail(detail)
    if out is not None:
        write_json(out, asdict(detail))


@_eval_app.command("spectrum")
def _spectrum(
    model: Annotated[Path, typer.Argument(help="converted checkpoint")], out: _Json = None
) -> None:
    """Leading dims that hold most of each layer's energy, and what one rank's row holds."""
    spectrum = Spectrum.of(Manifest.load(model))
    shown = [f"{energy:g} %" for energy in _ENERGIES]
    table = Table("layer", "core", *shown, "in one row", box=SIMPLE, caption="dims that hold")
    for layer in range(spectrum.plan.num_layers):
        dims = [str(spectrum.dims_for(layer, energy / 100)) for energy in _ENERGIES]
        core = str(spectrum.plan.core_dims[layer])
        table.add_row(str(layer), core, *dims, f"{spectrum.stored(layer):.2%}")
    Console().print(table)
    if out is not None:
        write_json(out, spectrum.to_dict(), indent=None)


@_eval_app.command("tasks")
def _tasks(
    url: Annotated[
        list[str], typer.Option(help="[LABEL=]http://HOST:PORT/v1; repeat it to compare modes")
    ],
    model: Annotated[
        str | None, typer.Option(help="name to ask for (default: the first of each endpoint)")
    ] = None,
    questions: Annotated[int, typer.Option(help="of each kind and recall distance")] = 20,
    concurrency: Annotated[int, typer.Option(help="questions under way at once")] = 4,
    timeout: Annotated[float, typer.Option(help="seconds for one answer")] = 120,
    beside: Annotated[
        list[Path] | None, typer.Option(help="earlier --json results, shown as more columns")
    ] = None,
    out: _Json = None,
) -> None:
    """Held-out questions, greedily, against running endpoints; status 1 if any went unanswered.

    Recall at growing distance, sums, lists, copying, stories: what the embedded model knows.
    """
    earlier = [result for path in beside or [] for result in load_results(path)]
    endpoints = [Endpoint.parse(each, model) for each in url]
    tasks = TaskSet(questions)
    with progress_bar() as progress:
        asked = [
            asyncio.run(ask_endpoint(each, tasks, concurrency, timeout, progress))
            for each in endpoints
        ]
    results = [*earlier, *asked]
    check_comparable(results)
    print_tasks(results)
    if out is not None:
        write_json(out, {"endpoints": [asdict(result) for result in results]})
    if any(result.failed for result in asked):
        sys.exit(1)


@_eval_app.command("answers")
def _answers(
    model: Annotated[Path, typer.Argument(help="converted reference model")],
    questions: Annotated[int, typer.Option(min=1, help="of each task")] = 20,
    recall_questions: Annotated[int, typer.Option(min=1, help="of each distance")] = 20,
    distance: Annotated[
        list[int] | None,
        typer.Option(help="tokens from a fact to its question, repeatable (1000 and 3000)"),
    ] = None,
    kv_format: _KVFormat = KVFormat.FP8,
    out: _Json = None,
    device: _Device = "cpu",
) -> None:
    """Held-out questions without serving: each right answer forced through decode."""
    subject = evaluation.Subject(model, check_device(device))
    spec = subject.spec(Mode.TPLA, kv_format, 0)
    with progress_bar() as progress:
        results = ask_checkpoint(
            subject, spec, questions, recall_questions, distance or [1000, 3000], progress
        )
    print_tasks(results)
    if out is not None:
        write_json(out, {"endpoints": [asdict(result) for result in results]})


def _measure(
    subject: evaluation.Subject,
    sequences: Sequence[torch.Tensor],
    specs: Sequence[DecodeSpec],
    context: int,
) -> list[evaluation.EvalRow]:
    with progress_bar() as progress:
        rows = evaluation.evaluate_specs(subject, sequences, specs, context, progress)
    _print_table(rows)
    return rows


def _print_table(rows: Sequence[evaluation.EvalRow]) -> None:
    columns = ("mode", "groups", "core", "kv", "prefill", "tokens", "ppl", "KL", "top-1")
    # Narrow enough for 80 columns: rich shortens the figures of a table that is not.
    table = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0), caption=f"basis: {rows[0].method}")
    for row in rows:
        table.add_row(
            *(row.name, str(row.groups), describe_core(row.core_dims), row.kv_format),
            *(str(row.prefill), str(row.tokens)),
            *(f"{row.ppl:.4f}", f"{row.kl:.6f}", f"{row.top1:.4f}"),
        )
    Console().print(table)


def _print_detail(detail: Detail) -> None:
    for title, ranges in (
        ("position", detail.by_position),
        ("distance attended over, tokens", detail.by_distance),
    ):
        table = Table(title, "tokens", "KL", "top-1", box=SIMPLE)
        for each in ranges:
            table.add_row(
                f"{each.start} to {each.stop - 1}", str(each.tokens),
                f"{each.kl:.6f}", f"{each.top1:.4f}",
            )  # fmt: skip
        Console().print(table)
    table = Table("layer", "error of attention's output over its energy", box=SIMPLE)
    for layer, error in enumerate(detail.layer_errors):
        table.add_row(str(layer), f"{error:.6f}")
    Console().print(table)


def print_tasks(results: Sequence[EndpointResult]) -> None:
    """One column of shares for each endpoint."""
    table = Table("exact answers, %", "questions", *(r.label for r in results), box=SIMPLE)
    for rows in zip(*(result.rows for result in results), strict=True):
        shares = [
            f"{100 * row.exact / row.questions:.1f}"
            + (f" ({row.failed} failed)" if row.failed else "")
            for row in rows
        ]
        table.add_row(rows[0].name, str(rows[0].questions), *shares)
    Console().print(table)
