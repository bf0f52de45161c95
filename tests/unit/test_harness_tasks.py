"""The lm-evaluation-harness tasks read what is written for them; the harness itself is not here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from tpla.convert.reference import harness_questions
from tpla.convert.reference.questions import RECALL_DISTANCES, TASK_KINDS
from tpla.core.checkpoint import REFERENCE_MODEL

HARNESS = Path(__file__).parents[2] / "convert" / "harness"
QUESTIONS = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    harness_questions.main(folder, QUESTIONS)
    return folder


def _task(name: str) -> dict[str, Any]:
    """A task with what it includes, as the harness merges them."""
    task: dict[str, Any] = yaml.safe_load((HARNESS / f"{name}.yaml").read_text())
    if "include" in task:
        task = yaml.safe_load((HARNESS / task.pop("include")).read_text()) | task
    return task


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("tpla_recall", [f"recall {distance}" for distance in RECALL_DISTANCES]),
        ("tpla_tasks", list(TASK_KINDS)),
    ],
)
def test_a_task_reads_the_fields_that_are_written(
    written: Path, name: str, kinds: list[str]
) -> None:
    task = _task(name)
    assert task["task"] == name
    lines = (written / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    for template in (task["doc_to_text"], task["doc_to_target"]):
        (variable,) = re.findall(r"\{\{(\w+)\}\}", template)
        assert all(document[variable] for document in documents)
    for kind in kinds:
        assert len([None for document in documents if document["kind"] == kind]) == QUESTIONS
    assert len(documents) == QUESTIONS * len(kinds)


@pytest.mark.parametrize("name", ["tpla_recall", "tpla_tasks"])
def test_no_right_answer_is_cut_off(written: Path, name: str) -> None:
    task = _task(name)
    tokenizer = Tokenizer.from_file(str(REFERENCE_MODEL / "tokenizer.json"))
    answers = [
        json.loads(line)["answer"]
        for line in (written / task["dataset_kwargs"]["data_files"]["test"]).open()
    ]
    limits = task["generation_kwargs"]
    assert all(len(tokenizer.encode(answer).ids) < limits["max_gen_toks"] for answer in answers)
    assert not any(stop in answer for stop in limits["until"] for answer in answers)


def test_a_recall_prompt_holds_the_fact_that_it_asks_for(written: Path) -> None:
    for line in (written / harness_questions.RECALL_FILE).open():
        document = json.loads(line)
        value = document["answer"].removesuffix(".").split()[-1]
        assert value in document["prompt"]
