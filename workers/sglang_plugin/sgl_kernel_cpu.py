"""Stand-in for the CUDA-only ``sgl_kernel`` wheel in CPU workers.

SGLang imports many names of ``sgl_kernel`` and calls two of them on the path that we use. Those two
are written here; every other name resolves to a function that raises when it is called, so that a
path nobody tried fails loudly.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

import torch

_PACKAGE = "sgl_kernel"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write consecutive runs of ``out_cache_loc`` into each request's row of ``req_to_token``."""
    taken = 0
    for row, start, end in _runs(req_pool_indices, start_offset, end_offset):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read each request's range of ``req_to_token`` into consecutive runs of ``out_cache_loc``."""
    taken = 0
    for row, start, end in _runs(req_pool_indices, start_offset, end_offset):
        count = end - start
        out_cache_loc[taken : taken + count] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += count


def _runs(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> zip[tuple[int, int, int]]:
    return zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)


_IMPLEMENTED: dict[str, Callable[..., None]] = {
    "assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu,
    "assign_extend_cache_locs_cpu": assign_extend_cache_locs_cpu,
}


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves ``sgl_kernel`` and every submodule of it."""

    def __init__(self, wheel_directory: Path | None) -> None:
        self._wheel_directory = wheel_directory

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(f"{_PACKAGE}."):
            return None
        if fullname == f"{_PACKAGE}.scalar_type":
            # Plain Python, and its values matter: take the wheel's own file. Without a wheel the
            # import must fail, because SGLang then uses a fallback of its own.
            return self._wheel_module(fullname, "scalar_type.py")
        return ModuleSpec(fullname, self, is_package=True)

    def _wheel_module(self, fullname: str, filename: str) -> ModuleSpec | None:
        if self._wheel_directory is None:
            return None
        file = self._wheel_directory / filename
        return importlib.util.spec_from_file_location(fullname, file) if file.exists() else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "0.4.5"  # type: ignore[attr-defined]  # SGLang compares it
        module.__getattr__ = _attributes_of(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes come from the module's ``__getattr__``."""


def _attributes_of(module_name: str) -> Callable[[str], Any]:
    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _IMPLEMENTED.get(name) or _missing(f"{module_name}.{name}")

    return getattribute


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} needs a GPU; this worker runs with device=cpu")

    return call


def install() -> None:
    """Answer every later ``import sgl_kernel`` of this process with the stand-in."""
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    spec = importlib.machinery.PathFinder.find_spec(_PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    sys.meta_path.insert(0, _StandInFinder(Path(locations[0]) if locations else None))
    importlib.invalidate_caches()
