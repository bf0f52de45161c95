"""The questions of ``tpla eval tasks``, answered by a checkpoint that is not served.

Answers are forced, see :mod:`tpla.convert.forced_answers`, so a long recall costs one pass, and
figures of models too large to serve here stand in the same table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tpla.convert.endpoint_tasks import RECALL, EndpointResult, TaskRow
from tpla.convert.evaluate import Subject
from tpla.convert.forced_answers import encode_exchange, exact_answers
from tpla.convert.reference.conversations import Question
from tpla.convert.reference.questions import TASK_KINDS, recall_questions, task_questions
from tpla.convert.sliced_attention import DecodeSpec
from tpla.convert.text import count_tokens, load_tokenizer


def ask_checkpoint(
    subject: Subject,
    spec: DecodeSpec,
    questions: int,
    recalls: int,
    distances: Sequence[int],
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[EndpointResult]:
    """Answers of the model itself and of decode after an exact prefill, in this order.

    Args:
        subject: a converted reference model.
        spec: how to decode; its ``prefill`` is replaced by each prompt's length.
        questions: of each task.
        recalls: questions of each distance.
        distances: least tokens from a fact to the question about it, by the model's tokenizer.
        progress: called with stage, kinds done, kinds in all.
    """
    begun = time.monotonic()
    tokenizer = load_tokenizer(subject.checkpoint.directory)
    rows: tuple[list[TaskRow], list[TaskRow]] = ([], [])
    kinds = len(distances) + len(TASK_KINDS)
    for done, (task, distance, asked) in enumerate(
        _tasks(tokenizer, questions, recalls, distances)
    ):
        progress("questions", done, kinds)
        exchanges = [encode_exchange(tokenizer, question) for question in asked]
        longest = max(each.prompt for each in exchanges)
        answers = exact_answers(subject, exchanges, spec)
        for found, right in zip(rows, zip(*answers, strict=True), strict=True):
            found.append(TaskRow(task, distance, len(asked), sum(right), 0, longest))
    seconds = round(time.monotonic() - begun, 1)
    name = subject.checkpoint.directory.resolve().name
    labels = ("mla fp32", f"{spec.mode.value} g={spec.plan.groups} {spec.kv_format.value}")
    return [
        EndpointResult(label, name, seconds, found, served=False)
        for label, found in zip(labels, rows, strict=True)
    ]


def _tasks(
    tokenizer: Any, questions: int, recalls: int, distances: Sequence[int]
) -> Iterator[tuple[str, int | None, list[Question]]]:
    """Task, distance where it is recall, and its questions."""
    for distance in distances:
        counting = partial(count_tokens, tokenizer)
        yield RECALL, distance, recall_questions(counting, distance, recalls)
    for kind in TASK_KINDS:
        yield kind, None, task_questions(kind, questions)
