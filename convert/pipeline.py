"""The whole conversion: check, calibrate, write, and only then give the folder its name.

Rotated tensors wait in files beside the output until their turn comes, so memory holds one layer
and a limited part of the calibration text's hidden states, whatever the number of layers.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tpla.convert.alignment import Alignment
from tpla.convert.calibrate import (
    LEARNING_STEPS,
    LayerResult,
    Recipe,
    calibrate_on_text,
    calibrate_without_text,
)
from tpla.convert.checkpoint_io import (
    CONFIG_NAME,
    DTYPES,
    WIDE_FLOATS,
    Checkpoint,
    OutputTensor,
    TensorEntry,
    dtype_name,
    read_header,
    write_file,
)
from tpla.convert.hidden_states import MEMORY_BYTES
from tpla.convert.layers import KEPT_FLOAT32, LayeredModel
from tpla.convert.logit_scale import QUERIES_PER_SEQUENCE, LogitScale
from tpla.convert.rewrite import KV_B, attention_prefix, encode_projections
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import CoreValues
from tpla.convert.staging import check_destination, copy_contents, staging_folder
from tpla.convert.text import load_tokenizer, read_sequences, sequence_context
from tpla.core.checkpoint import (
    INDEX_NAME,
    KEYS_TENSOR,
    MANIFEST_NAME,
    VALUES_FOLDER,
    VALUES_TENSOR,
    Manifest,
    fingerprint,
    values_digest,
    values_path,
)
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import ModelPlan

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts are done, and of how many."""

_ROTATED = ".rotated"
_TOKENS_PER_DIM = 16
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


@dataclass(frozen=True)
class ConversionOptions:
    """What ``tpla convert`` was asked for.

    Attributes:
        groups: latent groups of decode.
        core_dims: leading principal dims that every group keeps: one number for all layers, or one
            for each.
        method: basis of the latent.
        logit_scale: how logit scales are chosen.
        calibration: text, needed by ``fit`` and every basis that is measured.
        max_tokens: most calibration tokens.
        per_document: whether a calibration document begins a new sequence.
        context: tokens of a calibration sequence; None: 2048, or the model's own limit if lower.
        dtype: of all float tensors written; None keeps each tensor's own.
        seed: of random bases.
        device: where calibration computes.
        compute_dtype: in which dtype calibration computes.
        alignment: which decode weights are fitted; None: values, and keys if the basis is learned,
            where there is text to fit on.
        learning_steps: of a learned basis, for each layer.
        state_memory: bytes of hidden states in memory; what is more lies in a temporary file.
        core_values: how groups share the core's values where the fit of values begins.
        trust_remote_code: run the tokenizer's own code that lies in the checkpoint.
    """

    groups: int = 2
    core_dims: int | tuple[int, ...] = 0
    method: Method = Method.PCA
    logit_scale: LogitScale = LogitScale.FIT
    calibration: Path | None = None
    max_tokens: int = 65536
    context: int | None = None
    per_document: bool = False
    dtype: torch.dtype | None = None
    seed: int = 0
    device: str = "cpu"
    compute_dtype: torch.dtype = torch.float32
    alignment: Alignment | None = None
    learning_steps: int = LEARNING_STEPS
    state_memory: int = MEMORY_BYTES
    core_values: CoreValues = CoreValues.COUNTED
    trust_remote_code: bool = False


def convert_checkpoint(
    source: Path,
    destination: Path,
    options: ConversionOptions,
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Write the rotated checkpoint and its ``tpla.json``.

    Converting a converted checkpoint is allowed: it is an MLA model like any other, and the new
    manifest replaces the old one.

    Raises:
        CheckpointError: the source cannot be converted, or the destination exists.
        ConfigError: options that contradict each other, the text or the model.
    """
    checkpoint = Checkpoint(source)
    recipe = make_recipe(checkpoint, options)
    check_output(checkpoint, destination, options)
    with staging_folder(destination) as staging:
        results, facts = _results(checkpoint, recipe, options)
        _copy_other_files(checkpoint, staging, options.dtype)
        layers = int(checkpoint.config["num_hidden_layers"])
        spectra, scales = [], []
        (staging / _ROTATED).mkdir()
        if recipe.alignment is not Alignment.NONE:
            (staging / VALUES_FOLDER).mkdir()
        progress("layers", 0, layers)
        for result in results:
            _spill(staging / _ROTATED, checkpoint, result, options.dtype)
            _write_decode(staging, checkpoint, result, options.dtype)
            spectra.append(result.spectrum)
            scales.append(result.decode.scales_HG.tolist())
            progress("layers", result.layer + 1, layers)
        _write_weights(checkpoint, staging, options.dtype, progress)
        shutil.rmtree(staging / _ROTATED)
        _write_index(checkpoint, staging)
        manifest = Manifest(
            plan=recipe.plan,
            method=recipe.method.value,
            logit_scale=recipe.logit_scale.value,
            logit_scales=scales,
            spectrum=spectra,
            fingerprint=fingerprint(staging),
            source_fingerprint=fingerprint(source),
            calibration=facts,
            version=_version(),
            alignment=recipe.alignment.value,
            values_digest=_digest(staging, recipe, layers),
        )
        manifest.save(staging)
    return manifest


def check_output(checkpoint: Checkpoint, destination: Path, options: ConversionOptions) -> None:
    """Refuse a destination before any work for it.

    Raises:
        CheckpointError: the file system would not take the result.
    """
    needed = written_bytes(checkpoint, options.dtype)
    check_destination(checkpoint.directory, destination, needed)


def written_bytes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Bytes of the weights that a conversion to ``dtype`` writes."""
    total = 0
    for entry in checkpoint.entries.values():
        if dtype is not None and entry.dtype in WIDE_FLOATS:
            total += math.prod(entry.shape) * dtype.itemsize
        else:
            total += entry.size
    return total


def latent_rank(checkpoint: Checkpoint) -> int:
    """Dims of the model's latent.

    Raises:
        CheckpointError: not a model with latent attention.
    """
    rank = checkpoint.config.get("kv_lora_rank")
    if not isinstance(rank, int):
        raise CheckpointError(
            f"{checkpoint.directory}/{CONFIG_NAME} has no kv_lora_rank: not a model with latent "
            "attention; give a DeepSeek-V2 or -V3 style checkpoint"
        )
    return rank


def make_recipe(checkpoint: Checkpoint, options: ConversionOptions) -> Recipe:
    """What to find for every layer.

    Raises:
        CheckpointError: not a model with latent attention.
        ConfigError: options that contradict each other or the model.
    """
    rank = latent_rank(checkpoint)
    quantized = checkpoint.block_fp8 is not None  # raises for formats that we do not know
    if options.dtype is not None and quantized:
        raise ConfigError(
            f"dtype={options.dtype} for a block-FP8 checkpoint, which is written in its own "
            "format; leave --dtype out"
        )
    plan = ModelPlan(rank, options.groups, _layers_core(checkpoint, options.core_dims))
    if options.learning_steps < 1:
        raise ConfigError(f"learning_steps={options.learning_steps} must be at least 1")
    recipe = Recipe(
        plan=plan,
        method=options.method,
        logit_scale=options.logit_scale,
        seed=options.seed,
        alignment=_alignment(plan, options),
        learning_steps=options.learning_steps,
        core_values=options.core_values,
    )
    if recipe.needs_text and options.calibration is None:
        raise ConfigError(
            f"method={recipe.method.value} with logit_scale={recipe.logit_scale.value} needs "
            "calibration text; give --calibration PATH, or use --method hadamard with "
            "--logit-scale energy and --align none"
        )
    return recipe


def _layers_core(checkpoint: Checkpoint, core_dims: int | tuple[int, ...]) -> tuple[int, ...]:
    """Core dims of each layer."""
    layers = int(checkpoint.config["num_hidden_layers"])
    if isinstance(core_dims, int):
        return (core_dims,) * layers
    if len(core_dims) != layers:
        raise ConfigError(
            f"core_dims={','.join(map(str, core_dims))} is for {len(core_dims)} layers, the model "
            f"has {layers}; give one number for each, or one for all"
        )
    return core_dims


def _alignment(plan: ModelPlan, options: ConversionOptions) -> Alignment:
    if plan.groups == 1:
        return Alignment.NONE
    if options.alignment is None:
        learned = options.method is Method.LEARNED
        found = Alignment.KEYS_AND_VALUES if learned else Alignment.VALUES
        return Alignment.NONE if options.calibration is None else found
    if options.alignment is Alignment.KEYS_AND_VALUES and options.method is not Method.LEARNED:
        raise ConfigError(
            f"alignment={options.alignment.value} with method={options.method.value}: keys are "
            "learned together with the basis; use --method learned, or --align values"
        )
    return options.alignment


def _digest(staging: Path, recipe: Recipe, layers: int) -> str:
    return "" if recipe.alignment is Alignment.NONE else values_digest(staging, layers)


def _results(
    checkpoint: Checkpoint, recipe: Recipe, options: ConversionOptions
) -> tuple[Iterator[LayerResult], dict[str, Any]]:
    """The calibration, begun, and the facts about it that the manifest keeps."""
    # Built even without text: it refuses models that cannot be converted.
    model = LayeredModel(checkpoint, torch.device(options.device), options.compute_dtype)
    if options.calibration is None:
        heads = int(model.config.num_attention_heads)
        return calibrate_without_text(checkpoint, model.layers, heads, recipe), {
            "seed": recipe.seed
        }
    sequences = calibration_sequences(checkpoint, options)
    facts = {
        "path": options.calibration.name,
        "tokens": sum(part.shape[0] for part in sequences),
        "context": sequence_context(checkpoint.config, options.context),
        "per_document": options.per_document,
        "queries_per_sequence": QUERIES_PER_SEQUENCE,
        "seed": recipe.seed,
        "compute_dtype": str(options.compute_dtype).removeprefix("torch."),
    }
    return calibrate_on_text(model, sequences, recipe, options.state_memory), facts


def calibration_sequences(checkpoint: Checkpoint, options: ConversionOptions) -> list[torch.Tensor]:
    """Token ids ``[T]`` of each sequence of the calibration text.

    Raises:
        ConfigError: no text, or one that cannot be used, or too little for a measured basis.
    """
    if options.calibration is None:
        raise ConfigError("calibration=None, but this needs text; give --calibration PATH")
    if options.max_tokens < 2:
        raise ConfigError(f"max_tokens={options.max_tokens} must be at least 2")
    context = sequence_context(checkpoint.config, options.context)
    tokenizer = load_tokenizer(checkpoint.directory, options.trust_remote_code)
    sequences = read_sequences(
        options.calibration, tokenizer, context, options.max_tokens, options.per_document
    )
    tokens, rank = sum(part.shape[0] for part in sequences), latent_rank(checkpoint)
    if options.method.is_measured and tokens < rank:
        raise ConfigError(
            f"{tokens} calibration tokens do not determine a basis of kv_lora_rank={rank} dims; "
            f"give {few_tokens(rank)} or more, by text or --max-tokens, or use --method hadamard"
        )
    return sequences


def few_tokens(rank: int) -> int:
    """Calibration tokens below which what is measured of a latent of ``rank`` dims is rough."""
    return _TOKENS_PER_DIM * rank


def _spill(
    folder: Path, checkpoint: Checkpoint, result: LayerResult, dtype: torch.dtype | None
) -> None:
    tensors = encode_projections(checkpoint, result.layer, result.rotated, dtype)
    outputs = [OutputTensor.of(name, tensor) for name, tensor in tensors.items()]
    write_file(folder / f"{result.layer}.safetensors", outputs, {})


def _write_decode(
    staging: Path, checkpoint: Checkpoint, result: LayerResult, dtype: torch.dtype | None
) -> None:
    """Fitted projections, in the dtype that W_UKV is computed with."""
    fitted = {KEYS_TENSOR: result.decode.keys_GHNW, VALUES_TENSOR: result.decode.values_GHWV}
    tensors = {name: tensor for name, tensor in fitted.items() if tensor is not None}
    if not tensors:
        return
    name = attention_prefix(result.layer) + KV_B
    quantized = checkpoint.is_quantized(name)
    own = torch.bfloat16 if quantized else DTYPES[checkpoint.entry(name).dtype]
    outputs = [OutputTensor.of(part, tensor.to(dtype or own)) for part, tensor in tensors.items()]
    write_file(values_path(staging, result.layer), outputs, {})


def _write_weights(
    checkpoint: Checkpoint, staging: Path, dtype: torch.dtype | None, progress: Progress
) -> None:
    rotated: dict[str, TensorEntry] = {}
    for path in (staging / _ROTATED).iterdir():
        rotated.update(read_header(path)[0])
    for done, file in enumerate(checkpoint.files):
        progress("files", done, len(checkpoint.files))
        outputs = []
        for name in read_header(checkpoint.directory / file)[0]:
            entry = rotated.get(name) or checkpoint.entry(name)
            outputs.append(_output(name, entry, dtype))
        write_file(staging / file, outputs, checkpoint.metadata[file])
    progress("files", len(checkpoint.files), len(checkpoint.files))


def _output(name: str, entry: TensorEntry, dtype: torch.dtype | None) -> OutputTensor:
    same = dtype is None or entry.dtype not in WIDE_FLOATS or entry.dtype == dtype_name(dtype)
    if dtype is None or same or name.endswith(KEPT_FLOAT32):
        return OutputTensor.copy(name, entry)
    return OutputTensor.cast(name, entry, dtype)


def _copy_other_files(checkpoint: Checkpoint, staging: Path, dtype: torch.dtype | None) -> None:
    """Config, tokenizer, templates; not other copies of the weights, which are not rotated."""

    def skipped(name: str) -> bool:
        ours = name in (MANIFEST_NAME, VALUES_FOLDER)
        return ours or name.startswith(".") or name.endswith(_OTHER_WEIGHTS)

    copy_contents(checkpoint.directory, staging, skipped)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if key in checkpoint.config]
        config = {**checkpoint.config, **dict.fromkeys(keys or ["torch_dtype"], name)}
        (staging / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _write_index(checkpoint: Checkpoint, staging: Path) -> None:
    """The source's index, if it has one, with the size of what was written."""
    index = checkpoint.directory / INDEX_NAME
    if not index.exists():
        return
    document = json.loads(index.read_text())
    entries = [read_header(staging / file)[0] for file in checkpoint.files]
    total = sum(entry.size for part in entries for entry in part.values())
    kept = document.get("metadata")
    document["metadata"] = {**(kept if isinstance(kept, dict) else {}), "total_size": total}
    (staging / INDEX_NAME).write_text(json.dumps(document, indent=2) + "\n")


def _version() -> str:
    try:
        return version("tpla")
    except PackageNotFoundError:
        return ""
