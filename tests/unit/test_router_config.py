"""Flags and environment become one frozen configuration, or a sentence that says why not."""

from __future__ import annotations

import inspect
import io
import random

import pytest
import structlog
from pydantic import ValidationError

from tpla.core.config.router import (
    Policy,
    RouterConfig,
    WorkerAddress,
    parse_router_config,
)
from tpla.core.config.worker import Role
from tpla.core.errors import BadRequest, ConfigError, NotFound
from tpla.router.breaker import Verdict
from tpla.router.registry import Registry
from tpla.server import cli

FLAGS = {
    "prefill", "decode", "host", "port", "model", "api_key", "worker_api_key", "policy",
    "prefill_policy", "decode_policy", "cache_threshold", "balance_abs_threshold",
    "balance_rel_threshold", "retry_max_retries", "retry_max_lost_workers", "cb_failure_threshold",
    "cb_timeout_duration_secs", "health_check_interval_secs", "health_check_timeout_secs",
    "health_failure_threshold", "health_path", "load_path", "max_concurrent_requests",
    "queue_size", "queue_timeout_secs", "request_timeout_secs", "shutdown_grace_period_secs",
    "max_body_bytes", "leg_connect_timeout_secs", "leg_first_byte_timeout_secs",
    "leg_idle_timeout_secs", "leg_abort_timeout_secs",
    "client_head_timeout_secs", "client_body_timeout_secs", "client_write_timeout_secs",
    "client_keep_alive_timeout_secs",
}  # fmt: skip
"""Users' scripts depend on these names: removing one is a breaking change."""


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPLA_API_KEY", raising=False)
    monkeypatch.delenv("TPLA_WORKER_API_KEY", raising=False)


def flags(**given: object) -> RouterConfig:
    return cli.config_from_flags({**dict.fromkeys(FLAGS), **given})


def test_the_flags_are_frozen() -> None:
    assert set(inspect.signature(cli._router).parameters) == FLAGS


def test_no_flags_give_the_defaults() -> None:
    assert flags() == RouterConfig()


def test_idle_connections_outlive_those_of_a_balancer_in_front() -> None:
    assert flags().client.keep_alive > 60


def test_every_flag_arrives() -> None:
    changed = dict.fromkeys(FLAGS - {"prefill", "decode", "policy", "prefill_policy"}, 2) | {
        "host": "h", "model": "m", "api_key": "k", "worker_api_key": "w", "health_path": "/h",
        "load_path": "/l", "decode_policy": "random", "cache_threshold": 0.5,
        "max_body_bytes": 2048,
    }  # fmt: skip
    default = dict(_leaves(RouterConfig().model_dump()))
    for name, value in changed.items():
        leaves = dict(_leaves(flags(**{name: value}).model_dump()))
        assert sum(leaves[key] != default[key] for key in default) == 1, name


def _leaves(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves


def test_policy_stands_in_for_prefill_policy() -> None:
    assert flags(policy="random").prefill_policy is Policy.RANDOM
    assert flags(policy="random", prefill_policy="round_robin").prefill_policy is Policy.ROUND_ROBIN
    assert flags(policy="random").decode_policy is Policy.LEAST_LOADED


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["--prefill", "http://a:1", "8998", "--decode", "http://b:2"],
         ["--prefill", "http://a:1,8998", "--decode", "http://b:2"]),
        (["--prefill=http://a:1", "9"], ["--prefill=http://a:1,9"]),
        (["--prefill", "http://a:1", "--prefill", "http://c:1", "7"],
         ["--prefill", "http://a:1", "--prefill", "http://c:1,7"]),
        (["--port", "8000"], ["--port", "8000"]),
    ],
)  # fmt: skip
def test_bootstrap_ports_belong_to_the_url_before_them(given: list[str], joined: list[str]) -> None:
    assert cli.join_bootstrap_ports(given) == joined


def test_prefill_with_and_without_a_port() -> None:
    config = flags(prefill=["http://a:1,8998", "http://[::1]:2"], decode=["https://b:3/"])
    assert [a.bootstrap_port for a in config.prefill] == [8998, None]
    assert [a.host for a in config.prefill] == ["a", "::1"]
    assert config.decode[0].url == "https://b:3"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_several_workers_in_one_option_are_told_how_to_be_given(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"http://b:2.* --{role} URL .*--{role} URL"):
        flags(**{role: ["http://a:1,http://b:2"]})


@pytest.mark.parametrize("port", ["70000", "9" * 5000, "²"])
def test_what_is_no_bootstrap_port_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap[ _]port"):
        flags(prefill=[f"http://a:1,{port}"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70_000}, ["port=70000", "65535"]),
        ({"decode": [{"url": "b:3", "role": "decode"}]}, ["decode.0.url='b:3'", "http://"]),
        ({"decode": [{"url": "http://b:99999", "role": "decode"}]}, ["decode.0.url"]),
        ({"decode": [{"url": "http://b c:1", "role": "decode"}]}, ["decode.0.url", "no host"]),
        ({"retry": {"max_retries": -1}}, ["retry.max_retries=-1"]),
        ({"leg": {"connect": 0}}, ["leg.connect=0"]),
        ({"prefill_policy": "best"}, ["prefill_policy='best'", "round_robin"]),
        ({"nonsense": 1}, ["nonsense"]),
        ({"health": {"path": "health"}}, ["health.path"]),
        (
            {
                "prefill": [{"url": "http://a:1", "role": "prefill"}],
                "decode": [{"url": "http://a:1", "role": "decode"}],
            },
            ["http://a:1 is listed twice"],
        ),
    ],
)
def test_bad_values_are_named(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_router_config(values)
    for word in words:
        assert word in str(caught.value)


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPLA_API_KEY", "from-env")
    monkeypatch.setenv("TPLA_WORKER_API_KEY", "of-workers")
    config = parse_router_config({})
    assert (config.api_key, config.worker_api_key) == ("from-env", "of-workers")
    assert flags(api_key="given").api_key == "given"
    assert flags(worker_api_key="given").worker_api_key == "given"
    assert "from-env" not in repr(config) and "of-workers" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        parse_router_config({"worker_api_key": ["s3cret"]})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "worker_api_key"])
@pytest.mark.parametrize("key", ["s3cret\n", "s3cret two", "s3crét", "\x00s3cret"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(name: str, key: str) -> None:
    # With a line break at the end of a key, no client was let in and no worker could be asked.
    with pytest.raises(ConfigError, match=f"{name}.*printable ASCII without spaces") as caught:
        parse_router_config({name: key})
    assert "s3cr" not in str(caught.value)
    parse_router_config({name: "sk-proj_Aa0/+=.~!"})


def test_logged_exceptions_hold_no_local_variables() -> None:
    secret = "s3cret"
    written = io.StringIO()
    log = structlog.wrap_logger(structlog.PrintLogger(written), processors=cli.LOG_PROCESSORS)
    try:
        raise ValueError(len(secret))
    except ValueError:
        log.error("crashed", exc_info=True)
    assert "ValueError" in written.getvalue() and "test_router_config.py" in written.getvalue()
    assert secret not in written.getvalue()


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        RouterConfig().port = 1  # type: ignore[misc]


async def test_registry_leases_and_forgets() -> None:
    registry = Registry(RouterConfig(), rng=random.Random(0))
    prefill = registry.add(WorkerAddress(url="http://a:1", role=Role.PREFILL))
    decode = registry.add(WorkerAddress(url="http://b:1", role=Role.DECODE))
    with pytest.raises(BadRequest, match="known already"):
        registry.add(WorkerAddress(url="http://b:1", role=Role.PREFILL))
    assert prefill.bootstrap_port == 8998
    prefill.healthy = decode.healthy = True
    assert registry.ready
    pair = registry.lease_pair("prompt")
    assert (prefill.active, decode.active) == (1, 1)
    registry.drain(decode.id)
    assert not registry.ready and decode.id in registry.workers
    pair.decode.finish(Verdict.SUCCESS)
    pair.decode.finish(Verdict.FAILURE)
    assert decode.active == 0
    with pytest.raises(NotFound):
        registry.get(decode.id)
    pair.prefill.finish(Verdict.NEUTRAL)
    assert registry.snapshot("prompt").matches == {prefill.id: 1.0}
    registry.replaced(prefill)
    assert registry.snapshot("prompt").matches == {}
    await registry.close()
