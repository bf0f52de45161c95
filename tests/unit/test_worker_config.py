"""Values of a worker's configuration that do not fit together, and SGLang's flags made of it."""

from __future__ import annotations

from typing import Any

import pytest

from tpla.core.config import WorkerConfig, parse_worker_config
from tpla.core.errors import ConfigError
from tpla.workers.sglang_arguments import sglang_command_line


def config_of(**values: Any) -> WorkerConfig:
    given = {"role": "decode", "model": "m", "groups": 2, "instance_id": "i", **values}
    return parse_worker_config(given)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"groups": 1}, "use groups >= 2"),
        ({"groups": 0}, "groups"),
        ({"mode": "snapmla"}, "keeps the latent whole, groups=2"),
        ({"mode": "mla", "kv_format": "bf16"}, "keeps the latent whole, groups=2"),
        ({"mode": "snapmla", "groups": 1, "kv_format": "bf16"}, "snapmla is fp8"),
        ({"mode": "mla", "groups": 1}, "mode mla is exact"),
        ({"mode": "snapmla", "groups": 1, "scatter_output": True}, "--scatter-output"),
        ({"transfer": "nccl"}, "--transfer zmq"),
        ({"device": "cuda", "kv_format": "fp32"}, "on GPUs use bf16 or fp8"),
        ({"kv_format": "bf16", "pv_format": "fp8"}, "--pv-format"),
        ({"device": "tpu"}, "device"),
        ({"group": 2}, "group"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"role": "prefill", "groups": 1},
        {"pv_format": "fp8", "scatter_output": True},
        {"mode": "snapmla", "groups": 1},
        {"mode": "mla", "groups": 1, "kv_format": "fp32"},
        {"device": "cuda", "transfer": "nccl", "kv_format": "bf16"},
    ],
)
def test_values_that_fit_together_are_taken(values: dict[str, Any]) -> None:
    config_of(**values)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_on_a_cpu_runs_what_sglang_has_for_cpus(role: str) -> None:
    line = sglang_command_line(config_of(role=role), ())
    for flag, value in (
        ("--device", "cpu"),
        ("--dtype", "float32"),
        ("--grammar-backend", "llguidance"),
        ("--disaggregation-mode", role),
        ("--disaggregation-transfer-backend", "tpla_zmq"),
        ("--mem-fraction-static", "0.8"),
    ):
        assert line[line.index(flag) + 1] == value
    assert "--attention-backend" not in line


def test_every_worker_tells_its_metrics_once() -> None:
    assert sglang_command_line(config_of(), ()).count("--enable-metrics") == 1
    assert sglang_command_line(config_of(), ("--enable-metrics",)).count("--enable-metrics") == 1
