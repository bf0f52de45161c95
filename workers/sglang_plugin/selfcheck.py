"""Proof that the plug-in is in place; a worker that cannot give it refuses to start."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

from tpla.core.errors import HookError
from tpla.workers.sglang_plugin.targets import SGLANG_VERSION, Target


def check_version() -> None:
    """The installed SGLang is the pinned one.

    Raises:
        HookError: it is another release.
    """
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise HookError(
            f"sglang {installed} is installed, the plug-in is written for {SGLANG_VERSION}; "
            f"run: pip install sglang=={SGLANG_VERSION}"
        )


def resolve(target: Target) -> Any:
    """The object at ``target``, checked against the expected signature.

    Raises:
        HookError: nothing is there, or it takes other leading parameters.
    """
    try:
        found = pkgutil.resolve_name(target.path)
    except (ImportError, AttributeError) as error:
        raise HookError(
            f"sglang has no {target.path} ({error}); use sglang=={SGLANG_VERSION}"
        ) from error
    parameters = tuple(inspect.signature(found).parameters)
    if parameters[: len(target.parameters)] != target.parameters:
        raise HookError(
            f"{target.path} takes {parameters}, expected to begin with {target.parameters}; "
            f"use sglang=={SGLANG_VERSION}"
        )
    return found


def check_hooked(targets: Iterable[Target]) -> None:
    """Every target resolves to a wrapper that SGLang's registry made for this plug-in.

    Raises:
        HookError: a hook is not in place; names the target.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        found = resolve(target)
        ours = any(
            getattr(hook, "__module__", "").startswith("tpla.")
            for _, hook, _ in HookRegistry._hooks.get(target.path, [])
        )
        if (
            not ours
            or target.path not in HookRegistry._patched
            or not hasattr(found, "__wrapped__")
        ):
            raise HookError(
                f"the hook on {target.path} is not in place: the worker would serve plain MLA. "
                "Look for 'Failed to apply hooks' above; SGLANG_PLUGINS, if set, must name tpla"
            )
