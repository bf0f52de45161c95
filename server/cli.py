"""``tpla router``: flags to configuration, then serve.

The flag names are those of SGLang's own router where both have one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import structlog
import typer
from structlog.tracebacks import ExceptionDictTransformer

from tpla.core.config.router import Policy, RouterConfig, parse_router_config
from tpla.core.errors import ConfigError

PORT_SEPARATOR = ","

LOG_PROCESSORS: Sequence[structlog.typing.Processor] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    # Without local variables: they hold keys and what users wrote.
    structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
    structlog.processors.JSONRenderer(),
)
"""From an event to its line in the log."""


def router() -> None:
    """Entry point of ``tpla router``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(_router)
    app(args=join_bootstrap_ports(sys.argv[1:]), prog_name="tpla router")


def join_bootstrap_ports(arguments: list[str]) -> list[str]:
    """``--prefill URL PORT`` as ``--prefill URL,PORT``: option parsers know no optional value."""
    joined: list[str] = []
    for argument in arguments:
        after_url = (len(joined) >= 2 and joined[-2] == "--prefill") or (
            bool(joined) and joined[-1].startswith("--prefill=")
        )
        if after_url and argument.isdigit():
            joined[-1] += PORT_SEPARATOR + argument
        else:
            joined.append(argument)
    return joined


def _router(
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL [BOOTSTRAP_PORT]", help="Prefill worker; repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Decode worker; repeatable.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8000].")] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model name [as the workers report].")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must present [TPLA_API_KEY].")
    ] = None,
    worker_api_key: Annotated[
        str | None, typer.Option(help="Key presented to workers [TPLA_WORKER_API_KEY].")
    ] = None,
    policy: Annotated[
        Policy | None, typer.Option(help="Policy for prefill where --prefill-policy is absent.")
    ] = None,
    prefill_policy: Annotated[Policy | None, typer.Option(help="[cache_aware]")] = None,
    decode_policy: Annotated[Policy | None, typer.Option(help="[least_loaded]")] = None,
    cache_threshold: Annotated[float | None, typer.Option(help="cache_aware [0.3]")] = None,
    balance_abs_threshold: Annotated[int | None, typer.Option(help="cache_aware [32]")] = None,
    balance_rel_threshold: Annotated[float | None, typer.Option(help="cache_aware [1.5]")] = None,
    retry_max_retries: Annotated[int | None, typer.Option(help="[5]")] = None,
    retry_max_lost_workers: Annotated[
        int | None,
        typer.Option(
            help="A request under which so many workers went away, fell silent or failed gets no "
            "other [3]."
        ),
    ] = None,
    cb_failure_threshold: Annotated[int | None, typer.Option(help="[10]")] = None,
    cb_timeout_duration_secs: Annotated[float | None, typer.Option(help="[60]")] = None,
    health_check_interval_secs: Annotated[float | None, typer.Option(help="[5]")] = None,
    health_check_timeout_secs: Annotated[float | None, typer.Option(help="[5]")] = None,
    health_failure_threshold: Annotated[int | None, typer.Option(help="[3]")] = None,
    health_path: Annotated[str | None, typer.Option(help="[/health]")] = None,
    load_path: Annotated[
        str | None, typer.Option(help="Polled and shown in /workers; '' for none [/server_info].")
    ] = None,
    max_concurrent_requests: Annotated[int | None, typer.Option(help="[256]")] = None,
    queue_size: Annotated[int | None, typer.Option(help="[100]")] = None,
    queue_timeout_secs: Annotated[float | None, typer.Option(help="[60]")] = None,
    request_timeout_secs: Annotated[float | None, typer.Option(help="[1800]")] = None,
    shutdown_grace_period_secs: Annotated[float | None, typer.Option(help="[180]")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="[4194304]")] = None,
    leg_connect_timeout_secs: Annotated[float | None, typer.Option(help="[5]")] = None,
    leg_first_byte_timeout_secs: Annotated[float | None, typer.Option(help="[120]")] = None,
    leg_idle_timeout_secs: Annotated[float | None, typer.Option(help="[120]")] = None,
    leg_abort_timeout_secs: Annotated[float | None, typer.Option(help="[5]")] = None,
    client_head_timeout_secs: Annotated[float | None, typer.Option(help="[30]")] = None,
    client_body_timeout_secs: Annotated[float | None, typer.Option(help="[30]")] = None,
    client_write_timeout_secs: Annotated[float | None, typer.Option(help="[60]")] = None,
    client_keep_alive_timeout_secs: Annotated[
        float | None,
        typer.Option(help="More than the idle time-out of a balancer in front [75]."),
    ] = None,
) -> None:
    """Serve the OpenAI API from prefill and decode workers."""
    try:
        config = config_from_flags(locals())
    except ConfigError as error:
        print(f"tpla router: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    from tpla.server.lifecycle import serve

    _log_as_json()
    serve(config)


def config_from_flags(flags: dict[str, Any]) -> RouterConfig:
    """The configuration that ``flags`` (option name to value, None where absent) ask for.

    Raises:
        ConfigError: a value cannot be used; the message names it.
    """
    f = flags
    return parse_router_config(
        {
            "prefill": [_prefill_address(text) for text in f["prefill"] or ()],
            "decode": [_decode_address(url) for url in f["decode"] or ()],
            "host": f["host"],
            "port": f["port"],
            "model": f["model"],
            "api_key": f["api_key"],
            "worker_api_key": f["worker_api_key"],
            "prefill_policy": f["prefill_policy"] or f["policy"],
            "decode_policy": f["decode_policy"],
            "retry": {
                "max_retries": f["retry_max_retries"],
                "max_lost_workers": f["retry_max_lost_workers"],
            },
            "breaker": {
                "failure_threshold": f["cb_failure_threshold"],
                "timeout_secs": f["cb_timeout_duration_secs"],
            },
            "health": {
                "interval_secs": f["health_check_interval_secs"],
                "timeout_secs": f["health_check_timeout_secs"],
                "failure_threshold": f["health_failure_threshold"],
                "path": f["health_path"],
                "load_path": f["load_path"],
            },
            "admission": {
                "max_concurrent_requests": f["max_concurrent_requests"],
                "queue_size": f["queue_size"],
                "queue_timeout_secs": f["queue_timeout_secs"],
            },
            "cache_aware": {
                "match_threshold": f["cache_threshold"],
                "balance_abs_threshold": f["balance_abs_threshold"],
                "balance_rel_threshold": f["balance_rel_threshold"],
            },
            "leg": {
                "connect": f["leg_connect_timeout_secs"],
                "first_byte": f["leg_first_byte_timeout_secs"],
                "idle": f["leg_idle_timeout_secs"],
                "abort": f["leg_abort_timeout_secs"],
            },
            "client": {
                "head": f["client_head_timeout_secs"],
                "body": f["client_body_timeout_secs"],
                "write": f["client_write_timeout_secs"],
                "keep_alive": f["client_keep_alive_timeout_secs"],
            },
            "request_timeout_secs": f["request_timeout_secs"],
            "shutdown_grace_period_secs": f["shutdown_grace_period_secs"],
            "max_body_bytes": f["max_body_bytes"],
        }
    )


def _prefill_address(text: str) -> dict[str, object]:
    url, _, port = text.partition(PORT_SEPARATOR)
    if port and not port.isdecimal():
        raise ConfigError(
            f"--prefill {text}: {port!r} is not a bootstrap port; give each worker an option of "
            "its own: --prefill URL [BOOTSTRAP_PORT] --prefill URL [BOOTSTRAP_PORT]"
        )
    return {"url": url, "role": "prefill", "bootstrap_port": port or None}


def _decode_address(url: str) -> dict[str, object]:
    if PORT_SEPARATOR in url:
        raise ConfigError(
            f"--decode {url}: not one worker's base address; give each worker an option of its "
            "own: --decode URL --decode URL"
        )
    return {"url": url, "role": "decode"}


def _log_as_json() -> None:
    """One JSON line for each event, on standard output."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    structlog.configure(
        processors=list(LOG_PROCESSORS),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
