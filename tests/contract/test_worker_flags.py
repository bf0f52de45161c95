"""A worker takes SGLang's flags by their whole names alone, up to where SGLang would start."""

from __future__ import annotations

import json

from tests.contract.test_sglang_hooks import in_worker_process

_SERVE = """
import json, os
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.launch_server
import sglang.srt.server_args
from tpla.core.config import worker_config_from_environment
from tpla.core.errors import ConfigError
from tpla.workers.launch import serve
started = []
sglang.srt.server_args.prepare_server_args = lambda words: words
sglang.launch_server.run_server = started.append
def attempt(words):
    try:
        serve(worker_config_from_environment(), tuple(words))
    except ConfigError as error:
        return str(error)
found = [attempt(words) for words in json.loads(os.environ["TPLA_TEST_LINES"])]
print("RESULT" + json.dumps([found, len(started)]))
"""


def test_beginnings_of_flags_and_stray_words_end_a_worker_before_sglang_starts() -> None:
    refused = [
        ["--dcp", "2"],
        ["--enable-hierarchical"],
        ["--tokenizer-worker=4"],
        ["--tensor-parallel", "2"],
        ["--conf", "flags.yaml"],
        ["stray"],
        ["--port", "1", "2"],
    ]
    taken: list[list[str]] = [
        [],
        ["--tp-size=2"],
        ["--tp", "2", "--dp=2"],
        ["--attention-backend", "tpla_torch"],
        ["--disaggregation-transfer-backend", "fake"],
        ["--cuda-graph-bs-decode", "1", "2"],
    ]
    result, _ = in_worker_process(_SERVE, TPLA_TEST_LINES=json.dumps([*refused, *taken]))
    assert isinstance(result, list)
    errors, started = result
    for words, error in zip(refused, errors, strict=False):
        assert error is not None and words[-1] in error, words
        assert "write them out" in error
    assert errors[len(refused) :] == [None] * len(taken) and started == len(taken)
