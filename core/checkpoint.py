"""What a converted checkpoint says of itself (``tpla.json``), and any checkpoint's fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import ModelPlan

MANIFEST_NAME = "tpla.json"
INDEX_NAME = "model.safetensors.index.json"
MANIFEST_SCHEMA = 2
_ONE_CORE_SCHEMA = 1
"""Of releases whose plans have one ``core_dims`` for all layers; still read."""

UNALIGNED = "none"
"""The ``alignment`` of a checkpoint whose decode uses slices of its own weights."""

KEYED = "keys+values"
"""The ``alignment`` of a checkpoint whose decode has key projections of its own, too."""

ALIGNMENTS = (UNALIGNED, "values", KEYED)

KEYS_TENSOR = "keys"
VALUES_TENSOR = "values"
"""The tensors of :func:`values_path`; keys are there if the alignment is :data:`KEYED`."""

VALUES_FOLDER = "tpla_decode"

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "deploy" / "reference_model"
"""The embedded model; it comes with a checkout, not with a wheel."""

_TEXTS = (
    *("method", "logit_scale", "alignment", "version"),
    *("fingerprint", "source_fingerprint", "values_digest"),
)
_SAMPLE_BYTES = 4096
_DIGEST_BYTES = 1 << 20
_ROTATED = ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight")
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)


@dataclass(frozen=True)
class Manifest:
    """The content of ``tpla.json``.

    Attributes:
        plan: how decode divides the latent of each layer.
        method: how the rotation was chosen, ``pca``, ``centered``, ``attended``, ``queries``,
            ``learned``, ``hadamard`` or ``identity``.
        logit_scale: how :attr:`logit_scales` were found, ``fit``, ``one`` or ``energy``.
        logit_scales: ``[layer][head][group]``, multiplies the part of a decode logit that comes
            from the group's own slice (the shared core's and the RoPE's parts are never scaled).
        spectrum: ``[layer][dim]``, variance of the latent along each rotated dim, fraction of the
            layer's total.
        fingerprint: :func:`fingerprint` of the checkpoint that this file lies in.
        source_fingerprint: the same of the checkpoint that was converted.
        calibration: facts about the calibration text (path, tokens, context, ...).
        version: release of this package that wrote the file.
        alignment: which decode weights were fitted, ``none``, ``values`` or ``keys+values``; see
            :func:`values_path`. Logit scales do not apply to fitted keys.
        values_digest: :func:`values_digest` of the fitted projections.
    """

    plan: ModelPlan
    method: str
    logit_scale: str
    logit_scales: list[list[list[float]]]
    spectrum: list[list[float]]
    fingerprint: str
    source_fingerprint: str
    calibration: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    alignment: str = UNALIGNED
    values_digest: str = ""

    @property
    def aligned(self) -> bool:
        """Whether decode has value projections of its own."""
        return self.alignment != UNALIGNED

    @property
    def keyed(self) -> bool:
        """Whether decode has key projections of its own, too."""
        return self.alignment == KEYED

    def check_values(self, directory: Path) -> None:
        """The fitted value projections in ``directory`` are those that this manifest describes.

        Raises:
            CheckpointError: they are not, or are absent.
        """
        if self.aligned and values_digest(directory, len(self.logit_scales)) != self.values_digest:
            raise CheckpointError(
                f"{directory}/{VALUES_FOLDER}: the fitted value projections are not those that "
                f"{MANIFEST_NAME} describes; convert the model again"
            )

    def save(self, directory: Path) -> None:
        """Write ``tpla.json`` into ``directory``."""
        document = {"schema": MANIFEST_SCHEMA, **asdict(self)}
        (directory / MANIFEST_NAME).write_text(json.dumps(document) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read ``tpla.json`` from ``directory``.

        Raises:
            CheckpointError: the file is absent, malformed or of another schema.
        """
        path = directory / MANIFEST_NAME
        document = _parsed(
            path,
            f"{directory} has no {MANIFEST_NAME}; make one with: tpla convert {directory} DST",
            "convert the model again",
        )
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema not in (_ONE_CORE_SCHEMA, MANIFEST_SCHEMA):
            raise CheckpointError(
                f"{path} has schema {schema!r}, this release reads {_ONE_CORE_SCHEMA} and "
                f"{MANIFEST_SCHEMA}; "
                "convert the model again"
            )
        try:
            plan = document["plan"]
            if schema == _ONE_CORE_SCHEMA:
                layers = len(document["logit_scales"])
                plan = {**plan, "core_dims": [plan["core_dims"]] * layers}
            manifest = cls(**{**document, "plan": ModelPlan.from_dict(plan)})
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(
                f"{path} is malformed ({error}); convert the model again"
            ) from error
        for wrong in _contradictions(manifest):
            raise CheckpointError(f"{path} is malformed ({wrong}); convert the model again")
        return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What a manifest's fields say that cannot be, of themselves and of each other.

    An edited file, or one of another model, is to be refused where it is read, and by the name of
    the field; wherever the field is used later, it is an index out of range, or wrong answers.
    """
    plan = manifest.plan
    for name in _TEXTS:
        if not isinstance(value := getattr(manifest, name), str):
            yield f"{name}={value!r} is not a text"
    if manifest.alignment not in ALIGNMENTS:
        yield f"alignment={manifest.alignment!r} is none of {', '.join(ALIGNMENTS)}"
    if not isinstance(manifest.calibration, dict):
        yield f"calibration={manifest.calibration!r} is not an object"
    if not all(type(n) is int for n in (plan.kv_lora_rank, plan.groups, *plan.core_dims)):
        yield f"plan={plan} holds other than whole numbers"
    yield from _wrong_scales(manifest.logit_scales, plan)
    if manifest.spectrum != []:  # left out where nothing was measured
        yield from _wrong_table("spectrum", manifest.spectrum, plan.num_layers)
        for layer, shares in enumerate(manifest.spectrum):
            yield from _wrong_numbers(f"spectrum[{layer}]", shares, plan.kv_lora_rank)


def _wrong_scales(scales: Any, plan: ModelPlan) -> Iterator[str]:
    yield from _wrong_table("logit_scales", scales, plan.num_layers)
    for layer, heads in enumerate(scales):
        yield from _wrong_table(f"logit_scales[{layer}]", heads, len(scales[0]))
        for head, groups in enumerate(heads):
            yield from _wrong_numbers(f"logit_scales[{layer}][{head}]", groups, plan.groups)


def _wrong_table(name: str, value: Any, length: int) -> Iterator[str]:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        yield f"{name} is not a list of lists"
    elif len(value) != length:
        yield f"{name} has {len(value)} entries, the others imply {length}"


def _wrong_numbers(name: str, value: list[Any], length: int) -> Iterator[str]:
    if len(value) != length:
        yield f"{name} has {len(value)} entries, the plan implies {length}"
    for number in value:
        if type(number) not in (int, float) or not math.isfinite(number):
            yield f"{name} holds {number!r}, which is not a finite number"


def values_path(directory: Path, layer: int) -> Path:
    """File of a layer's fitted projections, in the basis of the checkpoint.

    Values are ``[group, head, latent_width, v_head_dim]``; keys, which turn a head's query without
    RoPE into the rank's absorbed one, ``[group, head, qk_nope_head_dim, latent_width]``.

    In a folder of its own: loaders of the checkpoint read every safetensors file beside it.
    """
    return directory / VALUES_FOLDER / f"layer-{layer:05d}.safetensors"


def values_digest(directory: Path, layers: int) -> str:
    """xxh3-128 over the fitted value projections of all layers.

    Raises:
        CheckpointError: one cannot be read.
    """
    digest = xxhash.xxh3_128()
    for layer in range(layers):
        path = values_path(directory, layer)
        try:
            with path.open("rb") as handle:
                while piece := handle.read(_DIGEST_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}); convert the model again"
            ) from error
    return digest.hexdigest()


def fingerprint(directory: Path) -> str:
    """Hash that changes with the model's tensors or its rotation, in time independent of its size.

    Covers name, dtype and shape of every tensor, and the first bytes of each layer's latent
    projections, which any other rotation changes. How tensors are spread over files is immaterial.

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: no safetensors files, or one is damaged.
    """
    digest = hashlib.sha256()
    for name, described, sample in sorted(_tensors(directory)):
        digest.update(f"{name}:{described}\n".encode())
        digest.update(sample)
    return digest.hexdigest()


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold a checkpoint's weights, sorted.

    Raises:
        CheckpointError: one is absent, or there is no telling whether one is.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder; give a HuggingFace checkpoint")
    index = directory / INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if not (directory / name).exists()]
        if absent:
            raise CheckpointError(
                f"{directory} lacks {len(absent)} of {len(files)} weight files, {absent[0]} first; "
                "complete the download"
            )
        return files
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} *.safetensors and no {INDEX_NAME}; "
            "give a HuggingFace checkpoint in safetensors format"
        )
    return files


def check_complete(directory: Path) -> None:
    """Whether every file of the weights is there, and as long as its header says.

    SGLang serves a checkpoint that lacks some, with whatever its memory held in their place.

    Raises:
        CheckpointError: it is not.
    """
    for name in weight_files(directory):
        safetensors_header(directory / name)


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, and the byte at which its tensors begin.

    Raises:
        CheckpointError: absent, damaged, or shorter than the header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > size:
                raise ValueError(f"header of {length} bytes, larger than the file")
            header = json.loads(handle.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error})") from error
    if needed > size:
        raise CheckpointError(
            f"{path} is cut short, {size} of {needed} bytes; copy or download it again"
        )
    return header, 8 + length


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        CheckpointError: there is none.
    """
    absent = f"{path} does not exist; give a folder with a HuggingFace checkpoint"
    document = _parsed(path, absent, "restore it")
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object; restore it")
    return document


def _parsed(path: Path, absent: str, remedy: str) -> Any:
    """What a JSON file holds; ``absent`` is the message where there is no file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(absent) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {remedy}") from error


def _tensors(directory: Path) -> Iterator[tuple[str, str, bytes]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} holds no *.safetensors; point at a HuggingFace checkpoint"
        )
    for path in files:
        header, begin = safetensors_header(path)
        try:
            with path.open("rb") as handle:
                for name, entry in header.items():
                    if name == "__metadata__":
                        continue
                    sample = b""
                    if name.endswith(_ROTATED):
                        start, stop = entry["data_offsets"]
                        handle.seek(begin + start)
                        sample = handle.read(min(stop - start, _SAMPLE_BYTES))
                    yield name, f"{entry['dtype']}{entry['shape']}", sample
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error})") from error
