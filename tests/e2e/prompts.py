"""Prompts for the embedded model: held-out questions of its own generator."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from transformers import AutoTokenizer

from tests.e2e.servers import REPOSITORY
from tpla.convert.reference.conversations import Question, recall_question, task_question

STOP = 2


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REPOSITORY / "deploy" / "reference_model")


def questions(count: int, seed: int = 1, longest: int = 400) -> list[Question]:
    """Recall at growing distance, in turn with sums and lists."""
    rng = Random(seed)
    made = []
    for index in range(count):
        if index % 2 == 0:
            distance = rng.randrange(10, longest)
            made.append(recall_question(rng, distance, lambda t: len(tokenizer().encode(t))))
        else:
            made.append(task_question(rng, rng.choice(["addition", "list", "copy", "story"])))
    return made


def counting_prompts(count: int) -> list[list[int]]:
    """Questions with long answers of which no token is in doubt.

    The two most likely tokens are 7 apart in their logits at the least, so rounding that depends on
    the batch changes nothing, and a damaged row does.
    """
    return [_as_sent([{"role": "user", "content": f"Count from {start} to {start + 38}."}])
            for start in range(1, 1 + 4 * count, 4)]  # fmt: skip


def chat_prompts(count: int, seed: int = 1, longest: int = 400) -> list[list[int]]:
    """Token ids of :func:`questions` as a chat client sends them."""
    asked = questions(count, seed, longest)
    return [_as_sent([message.as_dict() for message in question.messages]) for question in asked]


def _as_sent(messages: list[dict[str, str]]) -> list[int]:
    template = tokenizer().apply_chat_template
    return list(template(messages, add_generation_prompt=True, return_dict=False))
