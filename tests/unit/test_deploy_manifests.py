"""deploy/: our command line accepts what the manifests start, and serves what they probe."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit import manifests
from tests.unit.kustomize import Rendered, containers, pod_specs, render
from tests.unit.manifests import DEPLOY, OVERLAYS, CommandLine, compose, overlay, pod_arguments
from tpla.core.config.router import HealthPolicy, RouterConfig
from tpla.core.config.worker import Role
from tpla.router.health import PING_PATH
from tpla.server import operations
from tpla.server.service import GIVE_UP_SECONDS

ROUTER_PATHS = {route.path for route in operations.probes.routes}  # type: ignore[attr-defined]
WORKER_PATHS = {HealthPolicy().path, PING_PATH}
CLOSING_SECONDS = 3 * GIVE_UP_SECONDS
"""After the grace period: the drain's own end, then :meth:`Service.stop`."""
SGLANG_STOP_SECONDS = 5 + 15
"""SGLang 0.5.16 looks every 5 s whether its last request has ended, then gives its ranks 15 s."""
VARIANTS = tuple(manifests.COMPOSE_FILES)
SERVICES = ("convert", "prefill", "decode", "router")

ROLE_OF_SERVICE = {"prefill": Role.PREFILL, "decode": Role.DECODE}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return manifests.converted_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, model: Path) -> CommandLine:
    for name in ("TPLA_API_KEY", "TPLA_WORKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return CommandLine(monkeypatch, model)


def command(service: dict[str, Any]) -> list[str]:
    return [str(word) for word in service["command"]]


def router_of(line: CommandLine, arguments: list[str]) -> RouterConfig:
    config = line.accept(arguments).router
    assert config is not None
    return config


def seconds(duration: str) -> float:
    """A duration of the compose file; it uses whole seconds alone."""
    found = re.fullmatch(r"(\d+)s", duration)
    assert found, duration
    return float(found[1])


def probed(container: dict[str, Any]) -> list[tuple[str, int]]:
    """Path and port of each probe."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [value["httpGet"] for name, value in container.items() if name.endswith("Probe")]
    assert len(probes) == 3
    return [(probe["path"], ports[probe["port"]]) for probe in probes]


def worker_urls(rendered: Rendered, role: str, port: str) -> list[str]:
    """Names that a StatefulSet's pods get through its headless service."""
    workers = rendered.named("StatefulSet", f"tpla-{role}")
    name, service = workers["metadata"]["name"], workers["spec"]["serviceName"]
    assert rendered.named("Service", service)["spec"]["clusterIP"] == "None"
    return [f"http://{name}-{i}.{service}:{port}" for i in range(workers["spec"]["replicas"])]


# ---- compose


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("role", ROLE_OF_SERVICE)
def test_compose_workers_are_accepted(line: CommandLine, variant: str, role: str) -> None:
    found = line.accept(command(compose(variant)["services"][role]))
    assert found.worker is not None and found.worker.role is ROLE_OF_SERVICE[role]
    assert found.worker.device == {"cpu": "cpu", "gpu": "cuda"}[variant]
    assert found.sglang["--host"] == "0.0.0.0"


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_halves_agree(line: CommandLine, variant: str) -> None:
    services = compose(variant, TPLA_TRANSFER="nccl")["services"]
    prefill, decode = (line.accept(command(services[role])).worker for role in ROLE_OF_SERVICE)
    assert prefill is not None and decode is not None
    assert (prefill.transfer, prefill.mode, prefill.groups) == (
        decode.transfer, decode.mode, decode.groups,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_routes_to_the_containers_by_name(line: CommandLine, variant: str) -> None:
    file = compose(variant)
    workers = {
        role: line.accept(command(file["services"][role])).sglang for role in ROLE_OF_SERVICE
    }
    config = router_of(line, command(file["services"]["router"]))
    (prefill,), (decode,) = config.prefill, config.decode
    for role, address in (("prefill", prefill), ("decode", decode)):
        assert address.url == f"http://{file['name']}-{role}-1:{workers[role]['--port']}"
    assert str(prefill.bootstrap_port) == workers["prefill"]["--disaggregation-bootstrap-port"]
    assert config.model == workers["decode"]["--served-model-name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_converts_the_model_that_is_served(line: CommandLine, variant: str) -> None:
    services = compose(variant)["services"]
    plan = line.accept(command(services["convert"])).conversion
    assert plan is not None and plan.conversion
    for role in ROLE_OF_SERVICE:
        assert f"--model={plan.model}" in services[role]["command"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_checks_what_is_served(line: CommandLine, variant: str) -> None:
    services = compose(variant)["services"]
    for name in ("prefill", "decode", "router"):
        found = line.accept(command(services[name]))
        port = found.router.port if found.router else found.sglang["--port"]
        url = services[name]["healthcheck"]["test"][-1]
        path = url.removeprefix(f"http://127.0.0.1:{port}")
        assert path in (ROUTER_PATHS if found.router else WORKER_PATHS), url
    assert services["router"]["ports"][0].endswith(":8000")


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_waits_longer_than_the_drain(line: CommandLine, variant: str) -> None:
    services = compose(variant)["services"]
    drain = router_of(line, command(services["router"])).shutdown_grace_period_secs
    assert seconds(services["router"]["stop_grace_period"]) >= drain + CLOSING_SECONDS
    for role in ROLE_OF_SERVICE:
        grace = seconds(services[role]["stop_grace_period"])
        assert grace >= drain + CLOSING_SECONDS + SGLANG_STOP_SECONDS


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_starts_in_an_order_that_can_be_met(variant: str) -> None:
    file = compose(variant)
    services = file["services"]
    assert tuple(services) == SERVICES
    for service in services.values():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed]
            else:
                assert how["condition"] == "service_completed_successfully"
                assert services[needed]["restart"].startswith("on-failure")
        for mount in service.get("volumes", ()):
            assert mount.split(":")[0] in file["volumes"]
        for name in ("interval", "timeout", "start_period", "start_interval"):
            assert "healthcheck" not in service or seconds(service["healthcheck"][name]) > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_compose_containers_are_confined(variant: str) -> None:
    for service in compose(variant)["services"].values():
        assert int(service["user"].split(":")[0]) > 0
        assert service["init"] is True and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert re.fullmatch(r"tpla:\d+\.\d+\.\d+(-cuda)?", service["image"])


def test_compose_gives_each_gpu_rank_a_gpu_of_its_own(line: CommandLine) -> None:
    taken: list[str] = []
    services = compose("gpu")["services"]
    for role in ROLE_OF_SERVICE:
        (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
        ranks = int(line.accept(command(services[role])).sglang.get("--tp-size", "1"))
        assert len(device["device_ids"]) == ranks and device["capabilities"] == ["gpu"]
        taken += device["device_ids"]
    assert len(set(taken)) == len(taken)


# ---- Kubernetes


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("role", ROLE_OF_SERVICE)
def test_pods_run_workers_that_are_accepted(line: CommandLine, name: str, role: str) -> None:
    rendered = overlay(name)
    pod = rendered.named("StatefulSet", f"tpla-{role}")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = line.accept(pod_arguments(rendered, container))
    assert found.worker is not None and found.worker.role is ROLE_OF_SERVICE[role]
    assert found.worker.device == {"cpu": "cpu", "gpu": "cuda"}[name]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert gpus == (int(found.sglang["--tp-size"]) if name == "gpu" else 0)
    ports = {port["containerPort"] for port in container["ports"]}
    flags = ("--port", "--disaggregation-bootstrap-port")
    assert ports == {int(found.sglang[flag]) for flag in flags if flag in found.sglang}
    for path, port in probed(container):
        assert path in WORKER_PATHS and port == int(found.sglang["--port"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_say_where_their_kv_is(name: str) -> None:
    for workers in overlay(name).of("StatefulSet"):
        (container,) = workers["spec"]["template"]["spec"]["containers"]
        told = {item["name"]: item["valueFrom"] for item in container["env"]}
        assert told["SGLANG_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_router_knows_every_pod(line: CommandLine, name: str) -> None:
    rendered = overlay(name)
    (container,) = rendered.named("Deployment", "tpla-router")["spec"]["template"]["spec"][
        "containers"
    ]
    config = router_of(line, pod_arguments(rendered, container))
    assert [w.url for w in config.prefill] == worker_urls(rendered, "prefill", "30000")
    assert [w.url for w in config.decode] == worker_urls(rendered, "decode", "30100")
    assert {w.bootstrap_port for w in config.prefill} == {8998}
    assert config.host == "0.0.0.0"
    for path, port in probed(container):
        assert path in ROUTER_PATHS and port == config.port


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_and_budgets_find_their_pods(name: str) -> None:
    rendered = overlay(name)
    pods = [
        item["spec"]["template"] for item in rendered.objects if "template" in item.get("spec", {})
    ]
    for item in (*rendered.of("Service"), *rendered.of("PodDisruptionBudget")):
        selector = item["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        (pod,) = (p for p in pods if wanted.items() <= p["metadata"]["labels"].items())
        named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in item["spec"].get("ports", ())} <= named


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_given_longer_than_the_drain(line: CommandLine, name: str) -> None:
    rendered = overlay(name)
    router = rendered.named("Deployment", "tpla-router")["spec"]["template"]["spec"]
    (container,) = router["containers"]
    drain = router_of(line, pod_arguments(rendered, container)).shutdown_grace_period_secs
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    longest = before + drain + CLOSING_SECONDS
    assert router["terminationGracePeriodSeconds"] >= longest
    for workers in rendered.of("StatefulSet"):
        pod = workers["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= longest + SGLANG_STOP_SECONDS


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_confined(name: str) -> None:
    rendered = overlay(name)
    for pod in pod_specs(rendered):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
    for container in containers(rendered):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert re.fullmatch(r"tpla:\d+\.\d+\.\d+(-cuda)?", container["image"])
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_mount_what_they_declare(name: str) -> None:
    rendered = overlay(name)
    for pod in pod_specs(rendered):
        declared = {volume["name"] for volume in pod.get("volumes", ())}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= declared


def test_the_api_key_is_needed_but_on_a_laptop() -> None:
    for name, optional in (("cpu", True), ("gpu", False)):
        router = overlay(name).named("Deployment", "tpla-router")["spec"]["template"]["spec"]
        (key,) = router["containers"][0]["env"]
        assert key["name"] == "TPLA_API_KEY"
        assert key["valueFrom"]["secretKeyRef"].get("optional", False) is optional


def test_a_cluster_converts_the_model_that_is_served(line: CommandLine) -> None:
    rendered = overlay("cpu")
    job = rendered.named("Job", "tpla-convert")["spec"]["template"]["spec"]
    plan = line.accept(pod_arguments(rendered, job["containers"][0])).conversion
    assert plan is not None
    assert str(plan.model) == rendered.settings["tpla-settings"]["TPLA_MODEL"]
    claim = rendered.named("PersistentVolumeClaim", "tpla-state")["metadata"]["name"]
    for pod in (item for item in pod_specs(rendered) if "volumes" in item):
        (state,) = (volume for volume in pod["volumes"] if volume["name"] == "state")
        assert state["persistentVolumeClaim"]["claimName"] == claim


def test_a_patch_without_a_target_is_found(tmp_path: Path) -> None:
    base = DEPLOY / "kubernetes" / "base"
    patch = {"target": {"kind": "Deployment", "name": "nobody"}, "patch": "[]"}
    plan = {"kind": "Kustomization", "resources": [str(base)], "patches": [patch]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ValueError, match="no object fits"):
        render(tmp_path)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_renders_the_same(name: str) -> None:
    directory = DEPLOY / "kubernetes" / "overlays" / name
    done = subprocess.run(
        ["kubectl", "kustomize", directory], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = {
        (item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)
    }
    ours = overlay(name)
    for item in ours.objects:
        rendered = theirs.pop((item["kind"], item["metadata"]["name"]))
        assert without_names(rendered.get("spec")) == without_names(item["spec"])
    ((kind, _), settings), = theirs.items()  # fmt: skip
    assert kind == "ConfigMap" and settings["data"] == ours.settings["tpla-settings"]


def without_names(value: Any) -> Any:
    """Without what kustomize alone adds: our label in every selector, a hash in a map's name."""
    if isinstance(value, dict):
        return {
            key: without_names(inner)
            for key, inner in value.items()
            if key != "app.kubernetes.io/name"
        }
    if isinstance(value, list):
        return [without_names(inner) for inner in value]
    return (
        re.sub(r"^tpla-settings-\w{10}$", "tpla-settings", value)
        if isinstance(value, str)
        else value
    )


# ---- the image


def test_the_image_is_pinned_and_not_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    bases = re.findall(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE)
    bases.append(compose("gpu")["services"]["convert"]["build"]["args"]["BASE_IMAGE"])
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+", base)
    user = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user == [("10001", "10001")]
    assert 'ENTRYPOINT ["tpla"]' in text
    setup = (DEPLOY / "setup.sh").read_text()
    (uv,) = re.findall(r"uv_version=(\S+)", setup)
    assert f"uv=={uv}" in text


def test_the_image_holds_every_package_and_the_embedded_model() -> None:
    root = DEPLOY.parent
    kept = {
        line.removeprefix("!")
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert all((root / name).exists() for name in kept)
    packages = re.findall(r'^"tpla\.\w+" = "(\w+)"', (root / "pyproject.toml").read_text(), re.M)
    assert {*packages, "deploy/reference_model", "pyproject.toml", "requirements.lock"} <= kept
