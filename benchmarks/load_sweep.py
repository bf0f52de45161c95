"""A running endpoint under rising load: TTFT, TPOT and ITL percentiles, and goodput.

    python -m tpla.benchmarks.load_sweep --url http://127.0.0.1:8000 --tokenizer DIR --json OUT

SGLang's own load generator (``sglang.bench_serving``) sends the requests, as OpenAI chat
completions with Poisson arrivals, once for each rate; this file asks for the rates one after
another and judges every request by a bound on its TTFT and on its TPOT.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tpla.benchmarks.command import command_line
from tpla.benchmarks.machine import describe_machine
from tpla.core.config.environment import LOCAL_TOKENIZER, put

_console = Console(highlight=False)
_METRICS = ("ttft", "tpot", "itl")


@dataclass(frozen=True)
class Load:
    """What is sent at each rate.

    Attributes:
        url: of the endpoint, without ``/v1``.
        tokenizer: folder of the model's tokenizer, which counts tokens.
        prompts: requests at each rate.
        input_tokens: of a prompt, about.
        output_tokens: of an answer.
        timeout: seconds until a rate is given up.
        seed: of prompts and arrivals.
    """

    url: str
    tokenizer: Path
    prompts: int
    input_tokens: int
    output_tokens: int
    timeout: float
    seed: int


@dataclass(frozen=True)
class Bounds:
    """A request counts towards goodput when neither is exceeded, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Row:
    """One rate; ``request_rate`` in requests a second, all times in milliseconds."""

    benchmark: str
    request_rate: float
    input_tokens: int
    output_tokens: int
    completed: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    goodput_requests_per_s: float


class GeneratorFailed(RuntimeError):
    """SGLang's generator ended with an error, or not in time."""


def send(load: Load, model: str, rate: float) -> dict[str, Any]:
    """Run SGLang's generator at one rate; returns its report with each request's times.

    Raises:
        GeneratorFailed: it failed, or did not end in ``load.timeout`` seconds.
    """
    put(LOCAL_TOKENIZER, override=False)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
            *("--base-url", load.url, "--model", model, "--tokenizer", str(load.tokenizer)),
            *("--dataset-name", "random-ids", "--num-prompts", str(load.prompts)),
            *("--random-input-len", str(load.input_tokens)),
            *("--random-output-len", str(load.output_tokens), "--random-range-ratio", "1"),
            *("--request-rate", str(rate), "--seed", str(load.seed), "--disable-tqdm"),
            *("--output-details", "--output-file", str(report)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=load.timeout)
        except subprocess.TimeoutExpired as error:
            raise GeneratorFailed(
                f"{rate:g} requests a second took more than {load.timeout:g} s; raise the time-out"
            ) from error
        if done.returncode or not report.is_file():
            output = done.stdout[-3000:] + done.stderr[-3000:]
            raise GeneratorFailed(f"the generator ended with status {done.returncode}:\n{output}")
        found: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
        return found


def judge(report: dict[str, Any], load: Load, rate: float, bounds: Bounds) -> Row:
    """One row of SGLang's report."""
    failed = sum(1 for error in report["errors"] if error)
    good = sum(_is_good(*request, bounds) for request in _requests(report))
    percentiles = {
        f"{name}_ms_p{share}": float(report[f"{kind}_{name}_ms"])
        for name in _METRICS
        for share, kind in ((50, "median"), (99, "p99"))
    }
    return Row(
        benchmark="load",
        request_rate=rate,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        completed=report["completed"],
        failed=failed,
        requests_per_s=report["request_throughput"],
        output_tokens_per_s=report["output_throughput"],
        goodput_requests_per_s=good / report["duration"],
        **percentiles,
    )


def _requests(report: dict[str, Any]) -> list[tuple[float, list[float]]]:
    """TTFT and gaps between tokens, in seconds, of every request that was answered."""
    return [
        (ttft, itl)
        for ttft, itl, error in zip(report["ttfts"], report["itls"], report["errors"], strict=True)
        if not error
    ]


def _is_good(ttft: float, itl: list[float], bounds: Bounds) -> bool:
    tpot = sum(itl) / len(itl) if itl else 0.0
    return 1e3 * ttft <= bounds.ttft_ms and 1e3 * tpot <= bounds.tpot_ms


def show(rows: list[Row]) -> None:
    """A table for people."""
    table = Table("requests/s asked", "served", "good", "failed", "tokens/s",
                  *(f"{name.upper()} p50 / p99, ms" for name in _METRICS))  # fmt: skip
    for row in rows:
        values = asdict(row)
        table.add_row(
            f"{row.request_rate:g}",
            f"{row.requests_per_s:.2f}",
            f"{row.goodput_requests_per_s:.2f}",
            str(row.failed),
            f"{row.output_tokens_per_s:.0f}",
            *(f"{values[f'{n}_ms_p50']:.0f} / {values[f'{n}_ms_p99']:.0f}" for n in _METRICS),
        )
    _console.print(table)


def draw(rows: list[Row], bounds: Bounds, picture: Path) -> None:
    """Goodput, and TTFT and TPOT, over the rate that was asked for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    rates = [row.request_rate for row in rows]
    left.plot(rates, rates, "--", color="grey", label="asked")
    left.plot(rates, [row.requests_per_s for row in rows], "o-", label="served")
    left.plot(rates, [row.goodput_requests_per_s for row in rows], "s-",
              label=f"TTFT <= {bounds.ttft_ms:g} ms and TPOT <= {bounds.tpot_ms:g} ms")  # fmt: skip
    left.set(xlabel="requests a second", ylabel="requests a second")
    for name, mark in (("ttft", "o"), ("tpot", "s")):
        for share, style in ((50, "-"), (99, ":")):
            values = [asdict(row)[f"{name}_ms_p{share}"] for row in rows]
            right.plot(rates, values, mark + style, label=f"{name.upper()} p{share}")
    right.set(xlabel="requests a second", ylabel="ms", yscale="log")
    for axes in (left, right):
        axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main(
    out: Annotated[Path, typer.Option("--json", help="file to write")],
    tokenizer: Annotated[Path, typer.Option(help="folder of the model's tokenizer")],
    url: Annotated[str, typer.Option(help="endpoint, without /v1")] = "http://127.0.0.1:8000",
    rates: Annotated[str, typer.Option(help="requests a second, comma-separated")] = "1,2,4,8",
    prompts: Annotated[int, typer.Option(help="requests at each rate")] = 64,
    input_tokens: Annotated[int, typer.Option(help="of a prompt")] = 256,
    output_tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    ttft_ms: Annotated[float, typer.Option(help="bound of a good request")] = 2000,
    tpot_ms: Annotated[float, typer.Option(help="bound of a good request")] = 100,
    timeout: Annotated[float, typer.Option(help="seconds until a rate is given up")] = 900,
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 1,
    plot: Annotated[Path | None, typer.Option(help="picture to write")] = None,
    system: Annotated[str, typer.Option(help="what is measured, for the header")] = "",
) -> None:
    """Send at each rate in turn, print a table, write a JSON report and a picture."""
    load = Load(url, tokenizer, prompts, input_tokens, output_tokens, timeout, seed)
    bounds = Bounds(ttft_ms, tpot_ms)
    model = str(httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])
    command = command_line("load_sweep")
    header = {**describe_machine(command), "system": system, "model": model, **asdict(bounds)}
    rows: list[Row] = []
    for rate in track(list(map(float, rates.split(","))), "rates", console=Console(stderr=True)):
        rows.append(judge(send(load, model, rate), load, rate, bounds))
        report = {"header": header, "rows": [asdict(row) for row in rows]}
        out.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)
    if plot is not None:
        draw(rows, bounds, plot)


if __name__ == "__main__":
    typer.run(main)
