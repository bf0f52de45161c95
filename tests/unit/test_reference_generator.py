"""The generator of the reference model: deterministic, right, and held-out facts stay out."""

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tpla.convert.reference import stream, tasks, text
from tpla.convert.reference.conversations import (
    CHARS_PER_TOKEN,
    draw_conversation,
    recall_question,
    task_question,
)
from tpla.convert.reference.facts import Split, draw_fact

SUM = re.compile(r"(\d+) \+ (\d+) = (\d+)\.")


def count_words(message: str) -> int:
    return len(message.split())


def test_same_seed_same_text() -> None:
    first = [draw_conversation(Random(5)) for _ in range(3)]
    assert first == [draw_conversation(Random(5)) for _ in range(3)]
    assert draw_conversation(Random(6)) != first[0]


def test_chats_get_as_long_as_is_asked_for() -> None:
    def longest(tokens: int) -> int:
        chats = [draw_conversation(Random(seed), longest_tokens=tokens) for seed in range(60)]
        return max(sum(len(m.content) for m in chat) for chat in chats)

    assert longest(3900) < 1.2 * 3900 * CHARS_PER_TOKEN
    assert longest(8192) > 5000 * CHARS_PER_TOKEN


def test_chats_alternate_and_end_with_an_answer() -> None:
    rng = Random(1)
    for _ in range(50):
        roles = [m.role for m in draw_conversation(rng)]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)


@pytest.mark.parametrize("split", list(Split))
def test_sums_are_right_and_on_their_side(split: Split) -> None:
    rng = Random(2)
    for _ in range(300):
        turn = tasks.addition_series(rng, split)
        for a, b, total in (map(int, found) for found in SUM.findall(turn.assistant)):
            assert a + b == total
            assert tasks.split_of_sum(a, b) is split
            assert tasks.split_of_sum(b, a) is split


def test_training_chats_hold_no_test_sum() -> None:
    rng = Random(3)
    seen = 0
    for _ in range(150):
        for message in draw_conversation(rng):
            for a, b, _total in SUM.findall(message.content):
                seen += 1
                assert tasks.split_of_sum(int(a), int(b)) is Split.TRAIN
    assert seen > 100


def test_a_tenth_of_the_sums_is_held_out() -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    held_out = sum(tasks.split_of_sum(a, b) is Split.TEST for a, b in pairs)
    assert 0.08 < held_out / len(pairs) < 0.12


def test_facts_are_on_their_side_and_keys_are_new() -> None:
    rng = Random(4)
    for split in Split:
        taken: list[str] = []
        for _ in range(100):
            fact = draw_fact(rng, split, taken, similar=0.5)
            assert fact.split is split
            assert fact.key not in taken
            taken.append(fact.key)


@pytest.mark.parametrize("in_one_message", [False, True])
def test_recall_tells_the_fact_once_and_far_away(in_one_message: bool) -> None:
    rng = Random(7)
    for _ in range(40):
        question = recall_question(rng, 400, count_words, in_one_message)
        first, asked = question.messages[0].content, question.messages[-1].content
        assert question.value in first
        assert question.answer.endswith(f" is {question.value}.")
        assert question.distance is not None and question.distance >= 400
        key = re.sub(r"^[Yy]our ", "my ", question.answer.removesuffix(f" is {question.value}."))
        assert key.lower() in asked.lower()
        if not in_one_message:
            later = " ".join(m.content for m in question.messages[1:-1]).lower()
            assert f"{key.lower()} is " not in later


def test_list_answers_by_independent_computation() -> None:
    rng = Random(8)
    for _ in range(300):
        turn = tasks.list_question(rng)
        items = re.findall(
            r"\w+", turn.user.split(": ")[-1].removeprefix("Please reverse the list ")
        )
        said = turn.assistant.rstrip(".").split(" is ")[-1].split(", ")
        expected = {
            "sort": sorted(items, key=lambda w: int(w) if w.isdigit() else 0),
            "reverse": items[::-1],
            "first": items[:1],
            "last": items[-1:],
        }
        if turn.kind == "count":
            assert turn.assistant == f"The list has {len(items)} items."
        else:
            assert said == expected[turn.kind]


def test_unknown_kind_of_question_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of question 'chess'"):
        task_question(Random(1), "chess")


def test_text_command_writes_the_same_documents_again(tmp_path: Path) -> None:
    out = tmp_path / "documents.jsonl"
    app = typer.Typer()
    app.command()(text.main)
    result = CliRunner().invoke(app, ["--out", str(out), "--documents", "4", "--seed", "9"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == list(text.documents(4, 9))
    assert all(line["text"].startswith("<|bos|>") for line in lines)


def test_packing_keeps_chats_apart() -> None:
    chats = [
        (np.array([1, 5, 6], np.uint16), np.array([0, 1, 1], np.float16)),
        (np.array([1, 7, 8, 9], np.uint16), np.array([0, 0.1, 1, 1], np.float16)),
    ]
    batch = stream.pack(chats, size=6, max_chats=4)
    assert batch.tokens.tolist() == [1, 5, 6, 1, 7, 8]
    assert batch.targets.tolist() == [5, 6, 0, 7, 8, 0]
    assert batch.weights.tolist()[2] == 0 and batch.weights.tolist()[5] == 0
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.bounds.tolist() == [0, 3, 6, 6, 6]
    with pytest.raises(ValueError, match="cannot fill"):
        stream.pack(chats, size=60, max_chats=4)


def test_a_text_that_was_not_finished_does_not_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "documents", lambda *_: map(end, range(3)))
    with pytest.raises(KeyboardInterrupt):
        text.main(tmp_path / "text.jsonl")
    assert not (tmp_path / "text.jsonl").exists()
