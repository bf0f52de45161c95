"""The kernel tests on this machine's GPU, in one report.

    python -m tpla.benchmarks.gpu_tests --json OUT [-- PYTEST OPTIONS]

Several pytest processes share the GPU, since most of a test is work of the host. Errors that tests
record by context length (cosine difference to float64) are listed in the report. Run from the root
of the repository; exits with 1 where a test failed or a process did not finish its tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tpla.benchmarks.command import command_line
from tpla.benchmarks.machine import describe_machine

_DECODE = "tests/gpu/test_latent_decode.py"
_FLOAT64 = "test_matches_float64"
_REPEATED = "test_fp8_weights or emulation or repeatable"
SELECTIONS = (
    (_DECODE, "-k", _FLOAT64),
    (_DECODE, "-k", _REPEATED),
    (_DECODE, "-k", f"not {_FLOAT64} and not ({_REPEATED})"),
    ("tests/gpu/test_helpers.py", "tests/gpu/test_staging.py"),
    ("tests/kernels",),
)
"""What each process runs; together every kernel test once."""


def run_all(options: list[str], folder: Path) -> list[ElementTree.Element]:
    """Test cases of all processes.

    Raises:
        RuntimeError: a process ended without a report.
    """
    started: list[tuple[list[str], subprocess.Popen[str], Path]] = []
    for number, selection in enumerate(SELECTIONS):
        report = folder / f"{number}.xml"
        command = [sys.executable, "-m", "pytest", *selection, "-q", f"--junitxml={report}"]
        command += options
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append((command, process, report))
    cases = []
    for command, process, report in started:
        output, _ = process.communicate()
        if process.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"{' '.join(command)} made no report:\n{output[-4000:]}")
        print(output[-2000:], flush=True)
        cases += list(ElementTree.parse(report).getroot().iter("testcase"))
    return cases


def error_by_context(cases: list[ElementTree.Element]) -> list[dict[str, Any]]:
    """Cosine differences that tests recorded, one row a context length, one field a P V format."""
    rows: dict[int, dict[str, Any]] = {}
    for case in cases:
        recorded = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if "cosine_difference" in recorded:
            tokens = int(recorded["tokens"])
            row = rows.setdefault(tokens, {"tokens": tokens})
            row[f"pv_{recorded['pv_format']}"] = float(recorded["cosine_difference"])
    return [rows[tokens] for tokens in sorted(rows)]


def summarise(cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Counts, failures by name, and recorded errors."""
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "cosine_difference_by_context": error_by_context(cases),
    }


def main() -> int:
    """Run, write the report; 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--commit", help="for the header, where git cannot tell")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    command = command_line("gpu_tests")
    header = describe_machine(command, arguments.commit)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        summary = summarise(run_all(arguments.options, Path(folder)))
    summary["seconds"] = round(time.monotonic() - start)
    arguments.json.write_text(json.dumps({"header": header, **summary}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
