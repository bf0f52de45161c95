"""Forced answers agree with what the model says when it generates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tpla.convert import eval_cli
from tpla.convert.endpoint_tasks import load_results
from tpla.convert.evaluate import Subject
from tpla.convert.forced_answers import blocks, encode_exchange, exact_answers
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.reference.conversations import Question
from tpla.convert.reference.questions import TASK_KINDS, recall_questions, task_questions
from tpla.convert.reference.score import HuggingFaceModel
from tpla.convert.report import Findings, write_report
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import Mode
from tpla.convert.text import load_tokenizer
from tpla.core.checkpoint import REFERENCE_MODEL
from tpla.core.latent_layout import KVFormat


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(REFERENCE_MODEL)


@pytest.fixture(scope="module")
def questions(tokenizer: Any) -> list[Question]:
    """Four that the model answers, and four with another answer than the right one."""

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    right = [*recall_questions(count_tokens, 100, 2), *task_questions("addition", 2)]
    return right + [replace(question, answer=question.answer[:-2] + "9.") for question in right]


def test_a_forced_answer_is_exact_if_the_generated_one_is(
    questions: list[Question], tokenizer: Any
) -> None:
    generated = HuggingFaceModel(REFERENCE_MODEL, torch.device("cpu")).reply(questions, 8)
    expected = {reply.question: reply.exact for reply in generated}
    subject = Subject(REFERENCE_MODEL)
    exchanges = [encode_exchange(tokenizer, question) for question in questions]
    answers = exact_answers(subject, exchanges, subject.spec(Mode.MLA, KVFormat.FP32, 0))
    assert answers == [(expected[question], expected[question]) for question in questions]
    assert [exact for exact, _ in answers] == [True] * 4 + [False] * 4
    longest = max(len(each.ids_T) for each in exchanges)
    little = 2 * subject.model.config.hidden_size * 4 * (longest + 1)
    assert sum(1 for _ in blocks(exchanges, longest + 1)) > 2
    spec = subject.spec(Mode.MLA, KVFormat.FP32, 0)
    assert exact_answers(subject, exchanges, spec, little) == answers


def test_blocks_hold_every_question_once_and_no_more_tokens_than_allowed(
    questions: list[Question], tokenizer: Any
) -> None:
    exchanges = [encode_exchange(tokenizer, question) for question in questions]
    lengths = [len(each.ids_T) for each in exchanges]
    for tokens in (1, min(lengths), max(lengths), sum(lengths) // 2, sum(lengths)):
        found = list(blocks(exchanges, tokens))
        assert [each for block in found for each in block] == exchanges
        for block in found:
            assert len(block) == 1 or sum(len(each.ids_T) for each in block) <= tokens
    assert len(found) == 1
    assert list(blocks([], 10)) == []


def test_only_what_decode_computes_can_be_wrong(
    questions: list[Question], tokenizer: Any, tmp_path: Path
) -> None:
    options = ConversionOptions(groups=8, method=Method.IDENTITY, logit_scale=LogitScale.ONE)
    convert_checkpoint(REFERENCE_MODEL, tmp_path / "bad", options)
    subject = Subject(tmp_path / "bad")
    exchanges = [encode_exchange(tokenizer, question) for question in questions[:4]]
    spec = subject.spec(Mode.GLA, KVFormat.FP8, 0)
    answers = exact_answers(subject, exchanges, spec)
    assert [exact for exact, _ in answers] == [True] * 4
    assert not any(decoded for _, decoded in answers)
    # One token after the prompt is prefill's, whatever decode does.
    first = [replace(each, ids_T=each.ids_T[: each.prompt + 1]) for each in exchanges]
    assert exact_answers(subject, first, spec) == [(True, True)] * 4


def test_forced_answers_make_the_table_of_served_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConversionOptions(groups=8, method=Method.IDENTITY, logit_scale=LogitScale.ONE)
    convert_checkpoint(REFERENCE_MODEL, tmp_path / "bad", options)
    kept = tmp_path / "tasks_bad.json"
    asked = ["--questions", "2", "--recall-questions", "3", "--distance", "150"]
    command = ["tpla eval", "answers", tmp_path / "bad", *asked, "--json", kept]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    with pytest.raises(SystemExit) as stop:
        eval_cli.evaluate()
    assert not stop.value.code
    exact, decoded = load_results(kept)
    assert (exact.label, decoded.label) == ("mla fp32", "tpla g=8 fp8")
    assert [row.task for row in decoded.rows] == ["recall", *TASK_KINDS]
    assert [row.questions for row in exact.rows] == [3] + [2] * len(TASK_KINDS)
    assert exact.rows[0].distance == 150 and exact.rows[0].longest_prompt > 150
    assert sum(row.exact for row in decoded.rows) < sum(row.exact for row in exact.rows)
    findings = Findings()
    findings.read(tmp_path)
    page = write_report(tmp_path / "out", findings).read_text()
    assert "## Table 2, tasks_bad: forced answers, not served" in page
    assert f"| recall 150 | 3 | {100 * exact.rows[0].exact / 3:.1f} |" in page
