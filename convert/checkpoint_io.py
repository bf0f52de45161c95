"""Reading and writing safetensors checkpoints tensor by tensor.

A tensor is read with one seek and one read, and a file is written in chunks, so that memory holds
one tensor however large the checkpoint is. (Maps of whole files would count as resident memory.)

File format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range),
then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tpla.convert.block_fp8 import SCALE_SUFFIX, BlockFP8
from tpla.core.checkpoint import read_json, safetensors_header, weight_files
from tpla.core.errors import CheckpointError

CONFIG_NAME = "config.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WIDE_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that ``--dtype`` may replace; FP8 values mean nothing without their scales."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COPY_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        path: its file.
        dtype: name of the dtype in the header, a key of :data:`DTYPES`.
        shape: its shape.
        start: byte offset in the file.
        size: bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def load(self) -> torch.Tensor:
        """Read the tensor.

        Raises:
            CheckpointError: unknown dtype, or the file is shorter than its header says.
        """
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self.path} holds dtype {self.dtype}, which torch cannot read")
        buffer = bytearray(self.size)
        with self.path.open("rb") as handle:
            handle.seek(self.start)
            read = handle.readinto(buffer)
        if read != self.size:
            raise CheckpointError(f"{self.path} is cut short; copy or download it again")
        dtype = DTYPES[self.dtype]
        if not buffer:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).reshape(self.shape)

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes, a bounded piece at a time."""
        with self.path.open("rb") as handle:
            handle.seek(self.start)
            left = self.size
            while left:
                piece = handle.read(min(left, _COPY_BYTES))
                if not piece:
                    raise CheckpointError(f"{self.path} is cut short; copy or download it again")
                left -= len(piece)
                yield piece


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: what the header says of it, and its bytes on demand."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @classmethod
    def copy(cls, name: str, entry: TensorEntry) -> OutputTensor:
        """A tensor that is copied byte by byte."""
        return cls(name, entry.dtype, entry.shape, entry.chunks)

    @classmethod
    def cast(cls, name: str, entry: TensorEntry, dtype: torch.dtype) -> OutputTensor:
        """A tensor that is read, cast and written."""

        def chunks() -> Iterator[bytes]:
            yield tensor_bytes(entry.load().to(dtype))

        return cls(name, dtype_name(dtype), entry.shape, chunks)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> OutputTensor:
        """A tensor that is in memory."""
        return cls(
            name,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            lambda: iter([tensor_bytes(tensor)]),
        )

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a safetensors header gives ``dtype``."""
    return _NAMES[dtype]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries and metadata of one safetensors file.

    Raises:
        CheckpointError: absent, damaged or cut short.
    """
    header, begin = safetensors_header(path)
    try:
        metadata = header.pop("__metadata__", {})
        entries = {}
        for name, value in header.items():
            start, stop = value["data_offsets"]
            shape = tuple(value["shape"])
            entries[name] = TensorEntry(path, value["dtype"], shape, begin + start, stop - start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error})") from error
    return entries, metadata


def write_file(path: Path, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one chunk in memory at a time.

    Tensors are ordered by falling element size, then name, so that each is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in ordered:
            written = sum(handle.write(piece) for piece in tensor.chunks())
            assert written == tensor.size, (tensor.name, written, tensor.size)


class Checkpoint:
    """A HuggingFace checkpoint on disk; only headers are kept in memory.

    Attributes:
        directory: its folder.
        files: names of its safetensors files, sorted.
        entries: name of every tensor, and where it lies.
        metadata: each file's ``__metadata__``.

    Raises:
        CheckpointError: no config.json, no safetensors, or a file is absent or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = weight_files(directory)
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        for name in self.files:
            entries, self.metadata[name] = read_header(directory / name)
            self.entries.update(entries)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_json(self.directory / CONFIG_NAME)

    @cached_property
    def block_fp8(self) -> BlockFP8 | None:
        """Block-FP8 format of the quantised weights, None when there are none."""
        return BlockFP8.from_config(self.config)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def is_quantized(self, name: str) -> bool:
        """Whether tensor ``name`` is stored as block FP8."""
        return self.entry(name).dtype == "F8_E4M3" and name + SCALE_SUFFIX in self.entries

    def entry(self, name: str) -> TensorEntry:
        """Where tensor ``name`` lies.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self.entries:
            raise CheckpointError(
                f"{self.directory} has no tensor {name}; it is not a complete DeepSeek-V2 or -V3 "
                "style checkpoint"
            )
        return self.entries[name]

    def load(self, name: str) -> torch.Tensor:
        """Tensor ``name``; block-FP8 weights come dequantised, in float32.

        Raises:
            CheckpointError: no such tensor, or FP8 numbers that cannot be scaled.
        """
        if self.entry(name).dtype == "F8_E4M3" and name + SCALE_SUFFIX not in self.entries:
            raise CheckpointError(
                f"{name} is FP8 without its scales {name}{SCALE_SUFFIX}, and means nothing alone; "
                "complete the download, or give a checkpoint in block FP8 or BF16"
            )
        tensor = self.entry(name).load()
        if self.is_quantized(name):
            if self.block_fp8 is None:
                raise CheckpointError(
                    f"{name} is block FP8 but {CONFIG_NAME} has no quantization_config; restore it"
                )
            return self.block_fp8.dequantize(tensor, self.entry(name + SCALE_SUFFIX).load())
        return tensor
