"""``tpla convert`` and ``tpla eval``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.table import Table

from tpla.convert import evaluate as evaluation
from tpla.convert.alignment import Alignment
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import (
    ConversionOptions,
    Progress,
    convert_checkpoint,
    sequence_context,
)
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import DecodeSpec, Mode
from tpla.convert.text import load_tokenizer, read_sequences
from tpla.core.errors import ConfigError, TplaError
from tpla.core.latent_layout import KVFormat

_convert_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_eval_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Measure what decoding with a sliced or quantised latent loses.",
)


_PER_DOCUMENT = "each document of a .jsonl begins a new sequence, as chats are served"


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


def convert() -> None:
    """Run ``tpla convert``; errors of the user end it with one line and status 2."""
    # Without a handler SIGTERM would leave the half-written folder behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(_convert_app)
    finally:
        signal.signal(signal.SIGTERM, previous)


def evaluate() -> None:
    """Run ``tpla eval``; errors of the user end it with one line and status 2."""
    _run(_eval_app)


@_convert_app.command()
def _convert(
    src: Annotated[Path, typer.Argument(help="HuggingFace checkpoint (DeepSeek-V2 or -V3 style)")],
    dst: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    groups: Annotated[int, typer.Option(help="latent groups of decode")] = 2,
    method: Annotated[Method, typer.Option(help="basis of the latent")] = Method.PCA,
    core_dims: Annotated[
        int, typer.Option(help="leading dims of the basis that every group keeps")
    ] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option(help='text file, or .jsonl with "text" or "messages"; pca and fit need one'),
    ] = None,
    logit_scale: Annotated[
        LogitScale, typer.Option(help="factor of a slice's logits, per head and group")
    ] = LogitScale.FIT,
    max_tokens: Annotated[
        int, typer.Option(help="calibration tokens at most; their hidden states stay in memory")
    ] = 65536,
    context: Annotated[
        int | None, typer.Option(help="tokens of a sequence (default: 2048 or the model's limit)")
    ] = None,
    per_document: Annotated[bool, typer.Option("--per-document", help=_PER_DOCUMENT)] = False,
    align: Annotated[
        Alignment | None,
        typer.Option(
            help="decode weights to fit; the prefill checkpoint stays exact. Default: values, "
            "where there is calibration text"
        ),
    ] = None,
    dtype: Annotated[
        FloatType | None,
        typer.Option(
            help="dtype of all float tensors written; default: each keeps its own. float32 keeps "
            "the model's logits to 1e-4, bfloat16 rounds the rotated weights"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the random basis of hadamard")] = 0,
    device: Annotated[str, typer.Option(help="where calibration computes")] = "cpu",
    compute_dtype: Annotated[
        FloatType, typer.Option(help="dtype in which calibration computes")
    ] = FloatType.FLOAT32,
) -> None:
    """Rotate a checkpoint's latent, calibrate its division, write it with a tpla.json.

    The result is the same MLA model in HuggingFace's format; prefill serves it as it is.
    """
    options = ConversionOptions(
        groups=groups,
        core_dims=core_dims,
        method=method,
        logit_scale=logit_scale,
        calibration=calibration,
        max_tokens=max_tokens,
        context=context,
        per_document=per_document,
        dtype=None if dtype is None else dtype.torch,
        seed=seed,
        device=_device(device),
        compute_dtype=compute_dtype.torch,
        alignment=align,
    )
    with _progress_bar() as progress:
        manifest = convert_checkpoint(src, dst, options, progress)
    plan = manifest.plan
    print(
        f"{dst}: {len(manifest.spectrum)} layers, {manifest.method}, {plan.groups} groups of "
        f"{plan.slice_width} dims, {plan.core_dims} core dims, alignment {manifest.alignment}, "
        f"fingerprint {manifest.fingerprint[:16]}"
    )


_Model = Annotated[Path, typer.Argument(help="converted checkpoint, or a plain one for mla")]
_Text = Annotated[Path, typer.Option(help='text file, or .jsonl with "text" or "messages"')]
_Context = Annotated[int, typer.Option(help="tokens of a sequence")]
_Json = Annotated[Path | None, typer.Option("--json", help="write the result here")]
_MaxTokens = Annotated[int, typer.Option(help="tokens of text at most")]
_PerDocument = Annotated[bool, typer.Option("--per-document", help=_PER_DOCUMENT)]
_Device = Annotated[str, typer.Option(help="where to compute")]
_Dtype = Annotated[FloatType, typer.Option(help="dtype in which to compute")]


@_eval_app.command("ppl")
def _ppl(
    model: _Model,
    text: _Text,
    mode: Annotated[Mode, typer.Option(help="attention of decode")] = Mode.TPLA,
    kv_format: Annotated[KVFormat, typer.Option(help="format of the cache")] = KVFormat.FP32,
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
) -> None:
    """Perplexity, KL from the exact model and top-1 agreement of one way to decode."""
    subject = evaluation.Subject(model, _device(device), dtype.torch)
    sequences = _sequences(subject, text, context, max_tokens, per_document)
    specs = [subject.spec(mode, kv_format, prefill, score_from)]
    (row,) = _measure(subject, sequences, specs, context)
    if out is not None:
        _write_json(out, asdict(row))


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
) -> None:
    """MLA, GLA and TPLA; decode from the first token, and after a prefill of half the context.

    Every row scores the second half.
    """
    subject = evaluation.Subject(model, _device(device), dtype.torch)
    sequences = _sequences(subject, text, context, max_tokens, per_document)
    specs = evaluation.table_specs(subject, context)
    rows = _measure(subject, sequences, specs, context)
    if out is not None:
        _write_json(out, [asdict(row) for row in rows])


def _sequences(
    subject: evaluation.Subject, text: Path, context: int, max_tokens: int, per_document: bool
) -> list[torch.Tensor]:
    tokenizer = load_tokenizer(subject.checkpoint.directory)
    context = sequence_context(subject.checkpoint.config, context)
    return read_sequences(text, tokenizer, context, max_tokens, per_document)


def _measure(
    subject: evaluation.Subject,
    sequences: Sequence[torch.Tensor],
    specs: Sequence[DecodeSpec],
    context: int,
) -> list[evaluation.EvalRow]:
    with _progress_bar() as progress:
        rows = evaluation.evaluate_specs(subject, sequences, specs, context, progress)
    _print_table(rows)
    return rows


def _print_table(rows: Sequence[evaluation.EvalRow]) -> None:
    columns = ("mode", "groups", "core", "method", "kv", "prefill", "tokens", "ppl", "KL", "top-1")
    # Narrow enough for 80 columns: rich shortens the figures of a table that is not.
    table = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(
            *(row.mode, str(row.groups), str(row.core_dims), row.method, row.kv_format),
            *(str(row.prefill), str(row.tokens)),
            *(f"{row.ppl:.4f}", f"{row.kl:.6f}", f"{row.top1:.4f}"),
        )
    Console().print(table)


def _write_json(path: Path, document: object) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _device(name: str) -> str:
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
def _progress_bar() -> Iterator[Progress]:
    """A bar for each stage on stderr, gone when done."""
    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, object] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield advance


def _run(app: typer.Typer) -> None:
    try:
        app()
    except TplaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
