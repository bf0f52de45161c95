"""The part of kustomize that our manifests use, so that tests see what a cluster would be given."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KEYS = {
    "apiVersion", "kind", "resources", "labels", "images", "configMapGenerator", "replicas",
    "patches",
}  # fmt: skip
"""Labels are left out of what is rendered: they say whose an object is, not what it does."""


@dataclass
class Rendered:
    """Objects of a kustomization, and the settings that its config maps hold."""

    objects: list[Manifest] = field(default_factory=list)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Manifest]:
        """Objects of one kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest:
        """The one object of this kind and name."""
        (found,) = (item for item in self.of(kind) if item["metadata"]["name"] == name)
        return found


def render(directory: Path) -> Rendered:
    """What ``kubectl kustomize DIRECTORY`` would print, but for labels and hashes in names.

    Raises:
        ValueError: the kustomization uses what is not rendered here, or a target does not exist.
    """
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := plan.keys() - KEYS:
        raise ValueError(f"{directory}: {sorted(unknown)} is not rendered by the tests; add it")
    rendered = Rendered()
    for name in plan["resources"]:
        _add_resource(rendered, directory / name)
    for generator in plan.get("configMapGenerator", ()):
        _generate(rendered, generator)
    for count in plan.get("replicas", ()):
        for item in _targets(rendered, {"name": count["name"]}, with_replicas=True):
            item["spec"]["replicas"] = count["count"]
    for patch in plan.get("patches", ()):
        for item in _targets(rendered, patch["target"]):
            for operation in yaml.safe_load(patch["patch"]):
                _apply(item, operation)
    for image in plan.get("images", ()):
        for container in containers(rendered):
            if container["image"].split(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    return rendered


def pod_specs(rendered: Rendered) -> list[Manifest]:
    """The pod of every workload."""
    workloads = (item for item in rendered.objects if "template" in item.get("spec", {}))
    return [item["spec"]["template"]["spec"] for item in workloads]


def containers(rendered: Rendered) -> list[Manifest]:
    """Every container, those that run first included."""
    return [
        container
        for pod in pod_specs(rendered)
        for container in (*pod.get("initContainers", ()), *pod["containers"])
    ]


def _add_resource(rendered: Rendered, path: Path) -> None:
    if path.is_dir():
        below = render(path)
        rendered.objects += below.objects
        rendered.settings |= below.settings
    else:
        rendered.objects += [deepcopy(item) for item in yaml.safe_load_all(path.read_text())]


def _generate(rendered: Rendered, generator: Manifest) -> None:
    name = generator["name"]
    if (generator.get("behavior") == "merge") != (name in rendered.settings):
        raise ValueError(f"config map {name}: behavior merge belongs where it exists already")
    literals = dict(literal.split("=", 1) for literal in generator["literals"])
    rendered.settings[name] = {**rendered.settings.get(name, {}), **literals}


def _targets(
    rendered: Rendered, wanted: dict[str, str], with_replicas: bool = False
) -> list[Manifest]:
    found = [
        item
        for item in rendered.objects
        if wanted.get("kind", item["kind"]) == item["kind"]
        and wanted.get("name", item["metadata"]["name"]) == item["metadata"]["name"]
        and (not with_replicas or "replicas" in item["spec"])
    ]
    if not found:
        raise ValueError(f"no object fits the target {wanted}")
    return found


def _apply(item: Manifest, operation: Manifest) -> None:
    """One operation of a JSON patch (RFC 6902): add or replace."""
    *parents, last = operation["path"].strip("/").split("/")
    place: Any = item
    for step in parents:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if isinstance(place, list):
        if operation["op"] != "add" or last != "-":
            raise ValueError(f"{operation}: of lists only add to the end is rendered by the tests")
        place.append(operation["value"])
    elif operation["op"] == "add" or last in place:
        place[last] = operation["value"]
    else:
        raise ValueError(f"{operation}: there is nothing to replace")
