"""SGLang 0.5.16 knows every flag that deploy/'s manifests pass to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.test_sglang_hooks import in_worker_process
from tests.unit import manifests
from tpla.workers.launch import sglang_command_line

_PARSE = """
import argparse, json, os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
found = [parser.parse_args(line) for line in json.loads(os.environ["TPLA_TEST_LINES"])]
keys = ("host", "port", "tp_size", "disaggregation_mode", "served_model_name")
print("RESULT" + json.dumps([[getattr(one, key) for key in keys] for one in found]))
"""


def test_sglang_accepts_the_flags_of_every_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = manifests.CommandLine(
        monkeypatch, manifests.converted_checkpoint(tmp_path / "checkpoint")
    )
    lines, expected = [], []
    for command in manifests.worker_commands():
        found = line.accept(command)
        assert found.worker is not None
        given = tuple(f"{flag}={value}" for flag, value in found.sglang.items())
        lines.append(sglang_command_line(found.worker, given))
        port, tp_size = int(found.sglang["--port"]), int(found.sglang.get("--tp-size", "1"))
        name = found.sglang["--served-model-name"]
        expected.append(["0.0.0.0", port, tp_size, found.worker.role.value, name])
    parsed, _ = in_worker_process(_PARSE, TPLA_TEST_LINES=json.dumps(lines))
    assert parsed == expected and len(expected) == 8
