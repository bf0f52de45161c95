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


def chat_prompts(count: int, seed: int = 1, longest: int = 400) -> list[list[int]]:
    """Token ids of :func:`questions` as a chat client sends them."""
    return [
        list(
            tokenizer().apply_chat_template(
                [message.as_dict() for message in question.messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for question in questions(count, seed, longest)
    ]
