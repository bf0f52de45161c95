"""``tpla convert``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tpla.convert.alignment import Alignment
from tpla.convert.cli_parts import PER_DOCUMENT, FloatType, check_device, progress_bar, run_app
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method

_convert_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def convert() -> None:
    """Run ``tpla convert``; errors of the user end it with one line and status 2."""
    # Without a handler SIGTERM would leave the half-written folder behind.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run_app(_convert_app)
    finally:
        signal.signal(signal.SIGTERM, previous)


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
    per_document: Annotated[bool, typer.Option("--per-document", help=PER_DOCUMENT)] = False,
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
        device=check_device(device),
        compute_dtype=compute_dtype.torch,
        alignment=align,
    )
    with progress_bar() as progress:
        manifest = convert_checkpoint(src, dst, options, progress)
    plan = manifest.plan
    print(
        f"{dst}: {len(manifest.spectrum)} layers, {manifest.method}, {plan.groups} groups of "
        f"{plan.slice_width} dims, {plan.core_dims} core dims, alignment {manifest.alignment}, "
        f"fingerprint {manifest.fingerprint[:16]}"
    )
