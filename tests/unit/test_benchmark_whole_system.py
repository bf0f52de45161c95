"""Which processes stand for a whole system, and on how many GPUs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tpla.benchmarks.load_sweep import Bounds
from tpla.benchmarks.timing_model import write_timing_model, write_timing_tokenizer
from tpla.benchmarks.whole_system import Plan, system_process
from tpla.convert.text import load_tokenizer
from tpla.core.errors import ConfigError


def plan(tmp_path: Path) -> Plan:
    return Plan(
        "kimi-k2-attention", 1, 2, 1, 2, 2, 2, (1.0,), 10.0, 64, 16, Bounds(2000, 20), 60.0, 60.0,
        tmp_path, "--page-size 64", "--attention-backend triton", "--kv-format fp8",
        "--decode-attention-backend flashmla",
    )  # fmt: skip


def test_both_systems_have_the_same_gpus(tmp_path: Path) -> None:
    ours = system_process("tpla-fp8", plan(tmp_path), tmp_path, 8000).command
    theirs = system_process("sglang-fp8", plan(tmp_path), tmp_path, 8000).command
    ranks = [int(ours[ours.index(flag) + 1]) for flag in ("--prefill", "--decode")]
    assert sum(ranks) == int(theirs[theirs.index("--tp-size") + 1]) == 4


def test_flags_go_to_the_servers_that_they_are_for(tmp_path: Path) -> None:
    ours = system_process("tpla-fp8", plan(tmp_path), tmp_path, 8000).command
    theirs = system_process("sglang-fp8", plan(tmp_path), tmp_path, 8000).command
    assert ours[ours.index("--prefill-flags") + 1] == "--attention-backend triton"
    assert ours[ours.index("--decode-flags") + 1] == "--kv-format fp8"
    assert "--decode-attention-backend" in theirs and "fp8_e4m3" in theirs
    for command in (ours, theirs):
        assert {("--page-size", "64"), ("--load-format", "dummy")} <= set(pairwise(command))
    with pytest.raises(ConfigError, match="choose from tpla-fp8, sglang-bf16"):
        system_process("other", plan(tmp_path), tmp_path, 8000)


def test_a_text_has_as_many_tokens_as_words(tmp_path: Path) -> None:
    model = write_timing_model("deepseek-v2-lite", 2, tmp_path, layers=1)
    write_timing_tokenizer(model)
    tokenizer = load_tokenizer(model)
    ids = [5, 17, 1234, 102_399]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    chat = [{"role": "user", "content": tokenizer.decode(ids)}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == ids
