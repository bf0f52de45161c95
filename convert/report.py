"""What a conversion costs in accuracy, as one Markdown page with pictures.

Everything on it is read from results: spectra (``tpla eval spectrum``, or a manifest's), rows of
``tpla eval table``, sweeps over plans (``tpla.benchmarks.accuracy``), answers of endpoints (``tpla
eval tasks``). The figures of the paper
stand beside ours as it prints them; its model and text are others, so ratios compare, not values.

Source: TPLA, tables 1 and 2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpla.convert.endpoint_tasks import EndpointResult, load_results
from tpla.convert.evaluate import EvalRow
from tpla.convert.report_plots import draw_error_against_bytes, draw_spectrum
from tpla.convert.sliced_attention import CoreValues
from tpla.convert.spectrum import Spectrum
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import describe_core

PAGE = "report.md"
_ASKED = ("recall", "tasks")
"""Shares of exact answers that a sweep may have."""


@dataclass(frozen=True)
class Published:
    """A row of the paper's table 1: DeepSeek-V2-Lite, two groups.

    Attributes:
        title: what it is.
        ours: :attr:`EvalRow.name` of our row.
        separated: whether prefill is exact.
        ppl: WikiText-2 perplexity; None where the paper has no such row.
        average: of six tasks, per cent.
    """

    title: str
    ours: str
    separated: bool
    ppl: float | None
    average: float | None


TABLE_1 = (
    Published("MLA", "mla", False, 6.31, 61.75),
    Published("GLA", "gla", False, 2212.0, 33.77),
    Published("TPLA", "tpla -align", False, 7.24, 54.33),
    Published("TPLA, aligned", "tpla", False, 6.51, 61.52),
    Published("TPLA, exact prefill", "tpla -align", True, 6.31, 61.44),
    Published("TPLA, aligned, exact prefill", "tpla", True, None, None),
)
ABLATION = (
    Published("softmax sliced (served)", "tpla -align", False, None, None),
    Published("RMSNorm sliced", "tpla norm", False, None, None),
    Published("both sliced", "tpla both", False, None, None),
)
TABLE_2 = (("DeepSeek-V2-Lite", 28.90, 24.44), ("DeepSeek-V3", 58.19, 56.04))
"""LongBench average of MLA, and of TPLA with two groups after an exact prefill."""


@dataclass(frozen=True)
class Sweep:
    """One file of ``tpla.benchmarks.accuracy``.

    Attributes:
        rows: one for each plan and variant.
        model: name of the checkpoint that was converted.
        note: what the file's header says about the run; empty where it says nothing.
    """

    rows: list[dict[str, Any]]
    model: str
    note: str = ""


@dataclass
class Findings:
    """What the page is made of; every part may be absent.

    Attributes:
        spectra: of converted checkpoints, by name.
        evaluations: rows of ``tpla eval table``, by name.
        sweeps: results of ``tpla.benchmarks.accuracy``, by name.
        tasks: answers of endpoints, by name.
    """

    spectra: dict[str, Spectrum] = field(default_factory=dict)
    evaluations: dict[str, list[EvalRow]] = field(default_factory=dict)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    tasks: dict[str, list[EndpointResult]] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        """Add ``eval_*``, ``accuracy_*``, ``tasks_*`` and ``spectrum_*.json`` of a folder.

        Raises:
            ConfigError: a file is not what its name says.
        """
        for path in sorted(folder.glob("eval_*.json")):
            self.evaluations[path.stem] = read_rows(path)
        for path in sorted(folder.glob("accuracy_*.json")):
            self.sweeps[path.stem] = read_sweep(path)
        for path in sorted(folder.glob("tasks_*.json")):
            self.tasks[path.stem] = load_results(path)
        for path in sorted(folder.glob("spectrum_*.json")):
            self.spectra[path.stem.removeprefix("spectrum_")] = Spectrum.load(path)


def read_rows(path: Path) -> list[EvalRow]:
    """Rows that ``tpla eval table --json`` wrote, with or without a benchmark's header.

    Raises:
        ConfigError: the file does not hold such rows.
    """
    document = _load(path)
    try:
        rows = document["rows"] if isinstance(document, dict) else document
        return [EvalRow(**row) for row in rows]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no rows of this release's tpla eval table ({error}); write it again"
        ) from error


def read_sweep(path: Path) -> Sweep:
    """What ``tpla.benchmarks.accuracy --json`` wrote.

    Raises:
        ConfigError: the file does not hold it.
    """
    document = _load(path)
    try:
        note = document["header"].get("note", "")
        return Sweep(document["rows"], document["model"], note)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no result of tpla.benchmarks.accuracy ({error}); write it again"
        ) from error


def write_report(folder: Path, findings: Findings) -> Path:
    """Write the page and its pictures into ``folder``; returns the page's path.

    Raises:
        ConfigError: nothing to report, or no way to write or draw.
    """
    parts = [
        *(part for name, each in findings.evaluations.items() for part in _evaluation(name, each)),
        *(part for name, each in findings.tasks.items() for part in _answers(name, each)),
    ]
    if not (parts or findings.spectra or findings.sweeps):
        raise ConfigError("nothing to report; give --model, and --text or --results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, sweep in findings.sweeps.items():
            draw_error_against_bytes(sweep.rows, folder / f"{name}.png")
            parts += [f"## Error against bytes: {name}", _measured_on(sweep)]
            parts += [f"![KL]({name}.png)", _sweep(sweep.rows)]
        for name, spectrum in findings.spectra.items():
            draw_spectrum(spectrum, folder / f"spectrum-{name}.png")
            parts += [f"## Spectrum: {name}", _described(spectrum)]
            parts.append(f"![spectrum](spectrum-{name}.png)")
        page = folder / PAGE
        page.write_text("\n\n".join(["# Accuracy of TPLA decode", *parts]) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}") from error
    return page


def _evaluation(name: str, rows: Sequence[EvalRow]) -> list[str]:
    sliced = next((row for row in rows if row.groups > 1), rows[0])
    core = describe_core(sliced.core_dims)
    title = f"{name}: {sliced.groups} groups, {core} core dims, {sliced.method}"
    note = (
        f"{sliced.tokens} tokens, context {sliced.context}, positions from {sliced.scored_from} "
        "scored. Perplexity as a ratio to exact MLA's; the paper: DeepSeek-V2-Lite, WikiText-2, "
        "two groups. Scored positions decode in every row of ours. The paper's rows without an "
        "exact prefill slice the RMSNorm, too."
    )
    parts = [f"## Table 1, {title}", note, _compared(TABLE_1, rows)]
    if any(row.sliced != "softmax" for row in rows):
        parts += [f"### What is sliced, {title}", _compared(ABLATION, rows)]
    return parts


def _compared(published: Sequence[Published], rows: Sequence[EvalRow]) -> str:
    found = {(row.name, row.prefill > 0, row.kv_format): row for row in rows}
    base = found["mla", False, "fp32"]
    columns = ["", "paper: ppl ratio", "six tasks, %"]
    formats = ("fp32", "fp8")
    for kv_format in formats:
        columns += [f"{kv_format}: ppl ratio", "KL", "top-1, %"]
    lines = []
    for line in published:
        cells = [line.title, _ratio(line.ppl), "-" if line.average is None else f"{line.average}"]
        for kv_format in formats:
            row = found.get((line.ours, line.separated, kv_format))
            cells += ["-"] * 3 if row is None else _figures(row, base)
        lines.append(cells)
    return _table(columns, lines)


def _ratio(ppl: float | None) -> str:
    """A published perplexity over published MLA's."""
    exact = TABLE_1[0].ppl
    return "-" if ppl is None or exact is None else f"{ppl / exact:.3f}"


def _figures(row: EvalRow, base: EvalRow) -> list[str]:
    return [f"{row.ppl / base.ppl:.4f}", f"{row.kl:.5f}", f"{100 * row.top1:.2f}"]


def _answers(name: str, results: Sequence[EndpointResult]) -> list[str]:
    """Exact answers through the serving path, beside the paper's long-context scores."""
    columns = ["exact answers, %", "questions", *(result.label for result in results)]
    lines = [
        [rows[0].name, str(rows[0].questions)]
        + [f"{100 * row.exact / row.questions:.1f}" for row in rows]
        for rows in zip(*(result.rows for result in results), strict=True)
    ]
    paper = [
        [model, f"{mla:.2f}", f"{tpla:.2f}", f"{tpla / mla:.3f}"] for model, mla, tpla in TABLE_2
    ]
    served = "answers through the serving path"
    how = served if all(result.served for result in results) else "forced answers, not served"
    return [
        f"## Table 2, {name}: {how}",
        "The paper, LongBench average:",
        _table(["model", "MLA", "TPLA, exact prefill", "ratio"], paper),
        "Ours; recall is named by the least tokens between a fact and the question about it:",
        _table(columns, lines),
    ]


def _measured_on(sweep: Sweep) -> str:
    first = sweep.rows[0]
    text = (
        f"Model: {sweep.model}. {first['tokens']} tokens scored, context {first['context']}, "
        f"after an exact prefill of {first['prefill']}."
    )
    return f"{text}\n\nOf the run: {sweep.note}" if sweep.note else text


def _sweep(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["groups", "core dims", "method", "alignment"]
    shared = len({_core_values(row) for row in rows}) > 1
    columns += ["core's values"] * shared + ["bytes/token", "of the whole row", "KL", "top-1"]
    judged = all("exact_ppl" in row for row in rows)
    asked = all("questions" in row for row in rows)
    columns += ["ppl ratio"] * judged + ["recall", "tasks"] * asked
    lines = []
    for row in rows:
        cells = [str(row["groups"]), describe_core(row["core_dims"]), row["method"]]
        cells += [row["alignment"], *[_core_values(row)] * shared, f"{row['row_bytes']:g}"]
        cells += [f"{row['row_share']:.1%}", f"{row['kl']:.5f}", f"{row['top1']:.2%}"]
        if judged:
            cells.append(f"{row['ppl'] / row['exact_ppl']:.5f}")
        if asked:
            cells += [f"{row[kind]:.1%} of {row[f'exact_{kind}']:.1%}" for kind in _ASKED]
        lines.append(cells)
    parts = [_table(columns, lines), *_divisions(rows)]
    return "\n\n".join([*parts, _questions(rows[0])] if asked else parts)


def _core_values(row: dict[str, Any]) -> str:
    """How groups share the core's values; files of earlier releases do not say."""
    return str(row.get("core_values", CoreValues.COUNTED.value))


def _divisions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Core dims layer by layer of the plans that a table names by their bounds."""
    divided = {
        (row["groups"], tuple(row["core_dims"])): None
        for row in rows
        if isinstance(row["core_dims"], list)
    }
    plans = [f"{groups} groups {','.join(map(str, core))}" for groups, core in divided]
    return [f"Core dims by layer: {'; '.join(plans)}."] if plans else []


def _questions(row: dict[str, Any]) -> str:
    recalls = row.get("recall_questions", row["questions"])
    return (
        f"Recall and tasks: exact answers of decode, and of the exact model; {recalls} held-out "
        f"questions over {row['recall_distance']} tokens, and {row['questions']} of each task."
    )


def _described(spectrum: Spectrum) -> str:
    plan = spectrum.plan
    energies = [spectrum.stored(layer) for layer in range(plan.num_layers)]
    core = describe_core(plan.core_dims)
    return (
        f"{plan.groups} groups, {core} core dims: a rank stores {plan.latent_share:.1%} of the "
        f"latent. Group 0's dims hold {min(energies):.1%} of the energy in the worst layer, "
        f"{max(energies):.1%} in the best."
    )


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(columns), ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); write it again") from error
