"""SGLang 0.5.16 still is what the plug-in was written for; no server is started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tpla.core.config import parse_worker_config
from tpla.core.config.environment import (
    SGLANG_ANY_WORKER,
    SGLANG_TIERED_PREFILL_CACHE,
    SGLANG_UNLESS_SET,
)
from tpla.workers.launch import environment_for
from tpla.workers.sglang_plugin.targets import ALL_HOOKED, ATTENTION_CLASS

WORKER = {"role": "decode", "model": "/nowhere", "mode": "snapmla", "instance_id": "contract"}

_RESOLVE = """
import json, sys
from tpla.core.errors import HookError
from tpla.workers.sglang_plugin import selfcheck, targets
problems = {}
selfcheck.check_version()
for target in (*targets.ALL_HOOKED, targets.ATTENTION_CLASS, *targets.USED_BY_CUDA_DECODE):
    try:
        selfcheck.resolve(target)
    except HookError as error:
        problems[target.path] = str(error)
print("RESULT" + json.dumps(problems))
"""

_LOAD = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from tpla.core.config import worker_config_from_environment
from tpla.core.errors import HookError
from tpla.workers.sglang_plugin.hooks import required_targets
from tpla.workers.sglang_plugin.selfcheck import check_hooked
required = required_targets(worker_config_from_environment())
check_hooked(required)
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
assert TransferBackend("tpla_nccl").value == "tpla_nccl"
backend = TransferBackend("tpla_zmq")
names = {kind.name: get_kv_class(backend, kind).__module__ for kind in KVClassType}
print("RESULT" + json.dumps({"required": [t.path for t in required], "classes": names}))
"""

_BACKENDS = """
import json
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from tpla.core.config import worker_config_from_environment
from tpla.workers.sglang_plugin import hooks
config = worker_config_from_environment()
hooks._before_model_runner(config)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None)
print("RESULT" + json.dumps(ATTENTION_BACKENDS["tpla_torch"](runner)._pv_format.value))
"""


def in_worker_process(
    code: str, expect: int = 0, worker: dict[str, str] = WORKER, **variables: str
) -> tuple[object, str]:
    """Run ``code`` with the environment of a CPU worker, decode unless told otherwise."""
    import os

    environment = {**os.environ, **environment_for(parse_worker_config({**worker})), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == expect, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return (json.loads(lines[-1].removeprefix("RESULT")) if lines else None), done.stderr


def test_every_target_resolves_with_the_expected_signature() -> None:
    problems, _ = in_worker_process(_RESOLVE)
    assert problems == {}


SWITCHES = SGLANG_ANY_WORKER | SGLANG_TIERED_PREFILL_CACHE | SGLANG_UNLESS_SET


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_variables_that_sglang_needs_switch_off_what_it_does_by_default(name: str) -> None:
    from sglang.srt.environ import envs

    variable = getattr(envs, name)
    assert variable.default is True
    assert variable.parse(SWITCHES[name]) is False


def test_targets_are_listed_once() -> None:
    paths = [target.path for target in (*ALL_HOOKED, ATTENTION_CLASS)]
    assert len(paths) == len(set(paths))


def test_loading_the_plug_in_hooks_every_required_target() -> None:
    result, _ = in_worker_process(_LOAD)
    assert isinstance(result, dict)
    assert len(result["required"]) >= 14
    ours = {name for name, module in result["classes"].items() if module.startswith("tpla.")}
    assert ours == {"MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER"}


@pytest.mark.parametrize(("role", "expected"), [("decode", "fp8"), ("prefill", "fp16")])
def test_the_format_of_p_v_reaches_decodes_backend_and_leaves_prefill_exact(
    role: str, expected: str
) -> None:
    found, _ = in_worker_process(_BACKENDS, worker={**WORKER, "role": role, "pv_format": "fp8"})
    assert found == expected


@pytest.mark.parametrize("hindrance", [{"SGLANG_PLUGINS": "some_other_plugin"}])
def test_a_worker_whose_hooks_are_not_in_place_refuses_to_start(hindrance: dict[str, str]) -> None:
    _, errors = in_worker_process(_LOAD, expect=1, **hindrance)
    assert "the worker would serve plain MLA" in errors
    assert "SGLANG_PLUGINS" in errors
