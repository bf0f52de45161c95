"""Write the held-out questions as data of the lm-evaluation-harness tasks in `convert/harness`.

Run `python -m tpla.convert.reference.harness_questions --questions 20 --out FOLDER`.
They are questions that `tpla eval tasks` asks, too. The harness asks in one user message, so those
about earlier turns are left out. Each line is {"kind": ..., "prompt": ..., "answer": ...}.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from tpla.convert.reference.conversations import Question
from tpla.convert.reference.questions import (
    RECALL_DISTANCES,
    TASK_KINDS,
    recall_questions,
    task_questions,
)
from tpla.core.checkpoint import REFERENCE_MODEL

RECALL_FILE = "recall.jsonl"
TASKS_FILE = "tasks.jsonl"
_DRAWN = 8
"""Questions drawn for one that is written: of recall every fourth is one message, of stories about
every third."""


def recall_lines(count: int) -> Iterator[dict[str, str]]:
    """`count` questions of each distance, which is counted in the embedded model's tokens."""
    tokenizer = Tokenizer.from_file(str(REFERENCE_MODEL / "tokenizer.json"))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    for distance in RECALL_DISTANCES:
        drawn = recall_questions(count_tokens, distance, _DRAWN * count)
        yield from _lines(f"recall {distance}", drawn, count)


def task_lines(count: int) -> Iterator[dict[str, str]]:
    """`count` questions of each kind; of stories fewer where fewer of those drawn are single."""
    for kind in TASK_KINDS:
        yield from _lines(kind, task_questions(kind, _DRAWN * count), count)


def _lines(kind: str, drawn: list[Question], count: int) -> Iterator[dict[str, str]]:
    single = [question for question in drawn if len(question.messages) == 1]
    for question in single[:count]:
        (asked,) = question.messages
        yield {"kind": kind, "prompt": asked.content, "answer": question.answer}


def main(
    out: Annotated[Path, typer.Option(help="Folder to write recall.jsonl and tasks.jsonl into.")],
    questions: Annotated[int, typer.Option(help="Of each kind and recall distance.")] = 20,
) -> None:
    """Write both files."""
    for name, lines in (
        (RECALL_FILE, recall_lines(questions)),
        (TASKS_FILE, task_lines(questions)),
    ):
        with (out / name).open("w") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(main)
