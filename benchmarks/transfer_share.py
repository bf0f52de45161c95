"""What KV transfer is of a prompt's time to the first token, if nothing hid it.

    python -m tpla.benchmarks.transfer_share TRANSFER.json PREFILL.json ...

Adds ``ttft_pct`` to rows of ``transfer_gpu``'s report, from reports of ``serving --role prefill``
on the same model. Served, prompts of more than one chunk hide part of it behind the next chunk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tpla.benchmarks.transfer_gpu import MODEL
from tpla.core.errors import ConfigError

SYSTEM = "tpla-fp8"


def times_to_first_token(reports: list[dict[str, Any]]) -> dict[int, float]:
    """Milliseconds of our prefill worker by tokens of the prompt; a later report replaces.

    Raises:
        ConfigError: a report has no such row, or is of another model.
    """
    times: dict[int, float] = {}
    for report in reports:
        rows = [row for row in report["rows"] if row["system"] == SYSTEM and row["ttft_ms"]]
        others = {row["model"] for row in rows if not row["model"].startswith(MODEL.lower())}
        if others or not rows:
            found = ", ".join(sorted(others)) or f"no row of {SYSTEM} with a TTFT"
            raise ConfigError(f"{found}; give reports of serving --role prefill on {MODEL}")
        times |= {row["context"]: row["ttft_ms"] for row in rows}
    return times


def add_shares(rows: list[dict[str, Any]], times: dict[int, float]) -> None:
    """Per cent of TTFT, in the rows of transfers whose context has one."""
    for row in rows:
        if row.get("context") in times:
            row["ttft_pct"] = 100 * row["ms"] / times[row["context"]]


def main(
    transfer: Annotated[Path, typer.Argument(help="report of transfer_gpu; written anew")],
    prefill: Annotated[list[Path], typer.Argument(help="reports of serving --role prefill")],
) -> None:
    """Add the shares, and print them."""
    report = json.loads(transfer.read_text())
    add_shares(
        report["rows"], times_to_first_token([json.loads(each.read_text()) for each in prefill])
    )
    console = Console()
    for row in report["rows"]:
        if "ttft_pct" in row:
            what = f"{row['system']:5} g={row['groups']} {row['kv_format']:5}"
            share = f"{row['ms']:9.3f} ms {row['ttft_pct']:6.2f} % of TTFT"
            console.print(f"{what} {row['context']:6} tokens {share}", soft_wrap=True)
    transfer.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
