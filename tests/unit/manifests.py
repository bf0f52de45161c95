"""Commands of deploy/'s containers, and what our own command line makes of them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.checkpoints import make_checkpoint
from tests.unit.kustomize import Rendered, render
from tpla.core import cli
from tpla.core.checkpoint import Manifest, fingerprint
from tpla.core.config import WorkerConfig
from tpla.core.config.router import RouterConfig
from tpla.core.latent_layout import ModelPlan
from tpla.workers.deployment import DeploymentPlan

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = ("cpu", "gpu")
COMPOSE_FILES = {"cpu": ("compose.yaml",), "gpu": ("compose.yaml", "compose.gpu.yaml")}


@dataclass
class Accepted:
    """What a command line was understood as; ``sglang`` are the flags that pass through."""

    router: RouterConfig | None = None
    worker: WorkerConfig | None = None
    conversion: DeploymentPlan | None = None
    sglang: dict[str, str] = field(default_factory=dict)


class CommandLine:
    """Runs ``tpla`` up to the point where it would start to serve or to convert."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Path) -> None:
        self._patch = patch
        self._model = model

    def accept(self, arguments: list[str]) -> Accepted:
        """Parse ``arguments`` with the real parsers, for a checkpoint of the tests.

        Raises:
            AssertionError: the command line is refused.
        """
        found = Accepted()
        self._patch.setattr(
            "tpla.server.lifecycle.serve", lambda config: setattr(found, "router", config)
        )
        self._patch.setattr("tpla.workers.cli.serve", lambda *given: _note_worker(found, *given))
        self._patch.setattr(
            "tpla.workers.launch_cli._convert",
            lambda options, plan: setattr(found, "conversion", plan),
        )
        # The host of the tests need not have the devices that a manifest asks for.
        self._patch.setattr("tpla.workers.devices.gpu_count", lambda: 8)
        words = [re.sub(r"^--model=/.*", f"--model={self._model}", word) for word in arguments]
        self._patch.setattr(sys, "argv", ["tpla", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, arguments
        return found


def _note_worker(found: Accepted, config: WorkerConfig, arguments: tuple[str, ...]) -> None:
    found.worker = config
    found.sglang = dict(argument.split("=", 1) for argument in arguments)


def converted_checkpoint(directory: Path) -> Path:
    """A tiny checkpoint for two latent groups."""
    make_checkpoint(directory)
    mark = fingerprint(directory)
    plan = ModelPlan(64, 2, (0, 0))
    scales = [[[1.0, 1.0]] * 4] * 2
    Manifest(plan, "identity", "one", scales, [], mark, mark).save(directory)
    return directory


def compose(variant: str, **variables: str) -> dict[str, Any]:
    """The compose file with its override, ``${NAME:-default}`` filled in."""
    merged: dict[str, Any] = {}
    for name in COMPOSE_FILES[variant]:
        text = (DEPLOY / name).read_text()
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: variables.get(m[1]) or m[2], text)
        merged = _merge(merged, yaml.safe_load(text))
    return merged


def _merge(below: Any, above: Any) -> Any:
    """Compose's rule for what our override holds: mappings merge, all else is replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        changed = {
            name: _merge(below[name], value) if name in below else value
            for name, value in above.items()
        }
        return {**below, **changed}
    return above


def overlay(name: str) -> Rendered:
    """One overlay, rendered."""
    return render(DEPLOY / "kubernetes" / "overlays" / name)


def pod_arguments(rendered: Rendered, container: dict[str, Any]) -> list[str]:
    """A container's arguments as the kubelet would pass them, ``$(NAME)`` filled in.

    Raises:
        KeyError: a variable is in no config map of the container.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= rendered.settings[source["configMapRef"]["name"]]
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in container["args"]]


def worker_commands() -> list[list[str]]:
    """Every worker command line of compose and Kubernetes."""
    commands = [
        [str(word) for word in compose(variant)["services"][role]["command"]]
        for variant in COMPOSE_FILES
        for role in ("prefill", "decode")
    ]
    for name in OVERLAYS:
        rendered = overlay(name)
        commands += [
            pod_arguments(rendered, item["spec"]["template"]["spec"]["containers"][0])
            for item in rendered.of("StatefulSet")
        ]
    return commands
