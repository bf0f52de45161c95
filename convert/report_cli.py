"""``tpla report``: accuracy of converted checkpoints on one page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tpla.convert import evaluate as evaluation
from tpla.convert.cli_parts import PER_DOCUMENT, check_device, progress_bar, run_app, write_json
from tpla.convert.report import Findings, write_report
from tpla.convert.spectrum import Spectrum
from tpla.core.checkpoint import Manifest

_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def report() -> None:
    """Run ``tpla report``; errors of the user end it with one line and status 2."""
    run_app(_app)


@_app.command()
def _report(
    outdir: Annotated[Path, typer.Argument(help="folder to write report.md and pictures into")],
    model: Annotated[
        list[Path] | None, typer.Option(help="converted checkpoint, repeatable: its spectrum")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="held-out text: evaluate each --model on it now")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="folder with eval_, accuracy_, tasks_ and spectrum_*.json to show"),
    ] = None,
    context: Annotated[int, typer.Option(help="tokens of a sequence of --text")] = 2048,
    max_tokens: Annotated[int, typer.Option(help="tokens of --text at most")] = 65536,
    per_document: Annotated[bool, typer.Option("--per-document", help=PER_DOCUMENT)] = False,
    device: Annotated[str, typer.Option(help="where to compute")] = "cpu",
) -> None:
    """Spectra, error against bytes, and the TPLA paper's tables with our figures beside.

    A fresh evaluation is kept in OUTDIR as eval_NAME.json.
    """
    findings = Findings()
    if results is not None:
        findings.read(results)
    for path in model or []:
        findings.spectra[path.resolve().name] = Spectrum.of(Manifest.load(path))
    if text is not None:
        with progress_bar() as progress:
            for path in model or []:
                subject = evaluation.Subject(path, check_device(device))
                sequences = subject.sequences(text, context, max_tokens, per_document)
                specs = evaluation.table_specs(subject, context)
                findings.evaluations[path.resolve().name] = evaluation.evaluate_specs(
                    subject, sequences, specs, context, progress
                )
    page = write_report(outdir, findings)
    if text is not None:
        for path in model or []:
            name = path.resolve().name
            fresh = [asdict(row) for row in findings.evaluations[name]]
            write_json(outdir / f"eval_{name}.json", fresh)
    print(page)
