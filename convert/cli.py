"""``tpla convert`` and ``tpla plan``."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from tpla.convert.alignment import Alignment
from tpla.convert.calibrate import LEARNING_STEPS
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.cli_parts import (
    PER_DOCUMENT,
    FloatType,
    TrustRemoteCode,
    check_device,
    check_json,
    parse_core_dims,
    progress_bar,
    run_app,
    write_json,
)
from tpla.convert.division import choose_plan
from tpla.convert.hidden_states import MEMORY_BYTES
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, check_output, convert_checkpoint, few_tokens
from tpla.convert.plan_tables import print_candidates, print_choice
from tpla.convert.planning import WIDTH_MULTIPLE, Budget, survey
from tpla.convert.rotation import Method
from tpla.core.checkpoint import Manifest
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, describe_core

_convert_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def convert() -> None:
    """Run ``tpla convert``; errors of the user end it with one line and status 2."""
    # Without handlers these would leave the half-written folder behind. What nohup has ignored
    # stays ignored.
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        run_app(_convert_app)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def plan() -> None:
    """Run ``tpla plan``; errors of the user end it with one line and status 2."""
    run_app(_plan_app)


_Source = Annotated[Path, typer.Argument(help="HuggingFace checkpoint (DeepSeek-V2 or -V3 style)")]
_Groups = Annotated[int, typer.Option(help="latent groups of decode")]
_Basis = Annotated[Method, typer.Option("--method", help="basis of the latent")]
_Calibration = Annotated[
    Path | None,
    typer.Option(
        help='text file, or .jsonl with "text" or "messages"; a measured basis and fit need one'
    ),
]
_Scale = Annotated[
    LogitScale,
    typer.Option("--logit-scale", help="factor of a slice's logits, per head and group"),
]
_MaxTokens = Annotated[int, typer.Option(help="calibration tokens at most")]
_StateMemory = Annotated[
    int, typer.Option(help="MiB of hidden states in memory at most; more lie in a file in TMPDIR")
]
_Context = Annotated[
    int | None, typer.Option(help="tokens of a sequence (default: 2048 or the model's limit)")
]
_PerDocument = Annotated[bool, typer.Option("--per-document", help=PER_DOCUMENT)]
_Align = Annotated[
    Alignment | None,
    typer.Option(
        help="decode weights to fit; the prefill checkpoint stays exact. Default: values, and keys "
        "with a learned basis, where there is calibration text"
    ),
]
_Seed = Annotated[int, typer.Option(help="of hadamard's basis and of a learned one's samples")]
_Device = Annotated[str, typer.Option(help="where calibration computes")]
_ComputeDtype = Annotated[FloatType, typer.Option(help="dtype in which calibration computes")]
_BytesPerToken = Annotated[
    int | None,
    typer.Option(
        help="choose cores, divided by layer, whose row takes no more, mean over tokens and layers"
    ),
]
_MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        help="choose the smallest cores whose KL to the exact model, on every fourth sequence of "
        "the calibration text, is no larger",
    ),
]
_KVFormat = Annotated[
    KVFormat, typer.Option("--kv-format", help="format of the rows that a budget is for")
]
_Uniform = Annotated[
    bool, typer.Option("--uniform", help="a budget chooses one core for all layers")
]
_WidthMultiple = Annotated[
    int, typer.Option(help="a budget chooses among widths that are multiples of it")
]


@_convert_app.command()
def _convert(
    src: _Source,
    dst: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    groups: _Groups = 2,
    method: _Basis = Method.PCA,
    core_dims: Annotated[
        str | None,
        typer.Option(
            help="leading dims of the basis that every group keeps: one number, or one for each "
            "layer as in 0,0,32 [0]"
        ),
    ] = None,
    bytes_per_token: _BytesPerToken = None,
    max_kl: _MaxKl = None,
    kv_format: _KVFormat = KVFormat.FP8,
    uniform: _Uniform = False,
    width_multiple: _WidthMultiple = WIDTH_MULTIPLE,
    calibration: _Calibration = None,
    logit_scale: _Scale = LogitScale.FIT,
    max_tokens: _MaxTokens = 65536,
    context: _Context = None,
    per_document: _PerDocument = False,
    align: _Align = None,
    dtype: Annotated[
        FloatType | None,
        typer.Option(
            help="dtype of all float tensors written; default: each keeps its own. float32 keeps "
            "the model's logits to 1e-4, bfloat16 rounds the rotated weights"
        ),
    ] = None,
    learning_steps: Annotated[
        int, typer.Option(help="of a learned basis, for each layer")
    ] = LEARNING_STEPS,
    state_memory: _StateMemory = MEMORY_BYTES >> 20,
    seed: _Seed = 0,
    device: _Device = "cpu",
    compute_dtype: _ComputeDtype = FloatType.FLOAT32,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Rotate a checkpoint's latent, calibrate its division, write it with a tpla.json.

    The result is the same MLA model in HuggingFace's format; prefill serves it as it is.
    """
    options = ConversionOptions(
        groups=groups,
        core_dims=parse_core_dims("0" if core_dims is None else core_dims),
        method=method,
        logit_scale=logit_scale,
        calibration=calibration,
        max_tokens=max_tokens,
        context=context,
        per_document=per_document,
        dtype=None if dtype is None else dtype.torch,
        state_memory=state_memory << 20,
        seed=seed,
        device=check_device(device),
        compute_dtype=compute_dtype.torch,
        alignment=align,
        learning_steps=learning_steps,
        trust_remote_code=trust_remote_code,
    )
    budget = Budget(kv_format, bytes_per_token, max_kl, width_multiple)
    if budget.limited and core_dims is not None:
        raise ConfigError(
            f"--core-dims {core_dims} and a budget contradict each other; leave one of them out"
        )
    choice = None
    with progress_bar() as progress:
        if budget.limited:
            check_output(Checkpoint(src), dst, options)  # measuring takes as long as converting
            choice = choose_plan(src, options, budget, uniform, progress=progress)
            options = replace(options, core_dims=choice.chosen.plan.core_dims)
        manifest = convert_checkpoint(src, dst, options, progress)
    if choice is not None:
        print_choice(choice)
    _print_result(dst, manifest)


def _print_result(dst: Path, manifest: Manifest) -> None:
    plan, tokens = manifest.plan, manifest.calibration.get("tokens")
    read = "no calibration text" if tokens is None else f"{tokens} calibration tokens"
    print(
        f"{dst}: {plan.num_layers} layers, {manifest.method}, {plan.groups} groups, "
        f"{describe_core(plan.core_dims)} core dims, a rank holds {plan.latent_share:.1%} of the "
        f"latent, alignment {manifest.alignment}, {read}, fingerprint {manifest.fingerprint[:16]}"
    )
    enough = few_tokens(plan.kv_lora_rank)
    if tokens is not None and tokens < enough:
        print(
            f"warning: {tokens} calibration tokens are few for a latent of {plan.kv_lora_rank} "
            f"dims; give {enough} or more, by text or --max-tokens, and measure with tpla eval",
            file=sys.stderr,
        )


@_plan_app.command()
def _plan(
    src: _Source,
    groups: _Groups = 2,
    bytes_per_token: _BytesPerToken = None,
    max_kl: _MaxKl = None,
    kv_format: _KVFormat = KVFormat.FP8,
    uniform: _Uniform = False,
    width_multiple: _WidthMultiple = WIDTH_MULTIPLE,
    method: _Basis = Method.PCA,
    calibration: _Calibration = None,
    logit_scale: _Scale = LogitScale.FIT,
    max_tokens: _MaxTokens = 65536,
    context: _Context = None,
    per_document: _PerDocument = False,
    align: _Align = None,
    state_memory: _StateMemory = MEMORY_BYTES >> 20,
    seed: _Seed = 0,
    device: _Device = "cpu",
    compute_dtype: _ComputeDtype = FloatType.FLOAT32,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None,
        typer.Option("--json", callback=check_json, help="write the candidates here"),
    ] = None,
) -> None:
    """What every shared core costs in bytes and, with calibration text, in accuracy.

    With a limit, names the plan that tpla convert would choose, divided by layer where that
    measures better. Converts nothing.
    """
    options = ConversionOptions(
        groups=groups,
        method=method,
        logit_scale=logit_scale,
        calibration=calibration,
        max_tokens=max_tokens,
        context=context,
        per_document=per_document,
        state_memory=state_memory << 20,
        seed=seed,
        device=check_device(device),
        compute_dtype=compute_dtype.torch,
        alignment=align,
        trust_remote_code=trust_remote_code,
    )
    budget = Budget(kv_format, bytes_per_token, max_kl, width_multiple)
    measured, choice = calibration is not None, None
    with progress_bar() as progress:
        if budget.limited:
            choice = choose_plan(src, options, budget, uniform, measured, progress)
            candidates = choice.candidates
        else:
            candidates = survey(src, options, budget, progress, measured)
    print_candidates(candidates)
    if choice is not None:
        print_choice(choice)
    if out is not None:
        rows = {"candidates": [asdict(each) for each in candidates]}
        write_json(out, rows if choice is None else asdict(choice))
