"""The held-out questions by which a model, or an endpoint that serves it, is scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tpla.convert.reference.conversations import Question, recall_question, task_question

RECALL_DISTANCES = (100, 300, 600, 1000, 1500, 1900, 3000)  # tokens
TASK_KINDS = (
    "addition",
    "subtraction",
    "comparison",
    "list",
    "counting",
    "copy",
    "story",
    "told_story",
    "small_talk",
)
TEST_SEED = 20_001
NO_END = " [no end]"
"""Follows a reply that was cut off by its length limit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said to a question."""

    question: Question
    text: str
    prompt_tokens: int

    @property
    def exact(self) -> bool:
        """The whole answer, and nothing after it."""
        return self.text == self.question.answer


def summary(replies: Sequence[Reply]) -> dict[str, object]:
    """Share of exact answers, and the first wrong ones."""
    wrong = [r for r in replies if not r.exact]
    tokens = [r.prompt_tokens for r in replies]
    return {
        "questions": len(replies),
        "exact": round(1 - len(wrong) / len(replies), 4),
        "prompt_tokens": [min(tokens), max(tokens)],
        "wrong": [
            {
                "asked": r.question.messages[-1].content[-120:],
                "expected": r.question.answer,
                "said": r.text,
            }
            for r in wrong[:3]
        ],
    }


def recall_questions(
    count_tokens: Callable[[str], int], distance: int, count: int
) -> list[Question]:
    """Recall at ``distance`` tokens: three quarters over many turns, a quarter in one message."""
    rng = Random(f"{TEST_SEED}/recall/{distance}")
    return [
        recall_question(rng, distance, count_tokens, in_one_message=n % 4 == 3)
        for n in range(count)
    ]


def task_questions(kind: str, count: int) -> list[Question]:
    """Questions of one of :data:`TASK_KINDS`."""
    rng = Random(f"{TEST_SEED}/{kind}")
    return [task_question(rng, kind) for _ in range(count)]
