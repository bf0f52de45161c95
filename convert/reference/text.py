"""Write generated chats as JSON lines, for calibration and perplexity.

Run `python -m tpla.convert.reference.text --documents 500 --seed 7 --out FILE`.
Each line is {"text": the chat as the chat template renders it, "messages": [...]}.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from tpla.convert.reference.conversations import draw_conversation
from tpla.convert.reference.facts import Split
from tpla.convert.reference.tokenizer import render


def documents(
    count: int, seed: int, split: Split = Split.TRAIN, longest_tokens: int = 1900
) -> Iterator[dict[str, object]]:
    """`count` chats, the same for the same arguments, of roughly up to `longest_tokens`."""
    rng = Random(f"documents/{seed}")
    for _ in range(count):
        chat = draw_conversation(rng, split, longest_tokens)
        yield {"text": render(chat), "messages": [m.as_dict() for m in chat]}


def main(
    out: Annotated[Path, typer.Option(help="File to write.")],
    documents_count: Annotated[int, typer.Option("--documents", help="Number of chats.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 7,
    split: Annotated[Split, typer.Option(help="Facts and sums of which side.")] = Split.TRAIN,
    longest_tokens: Annotated[int, typer.Option(help="Rough length limit.")] = 1900,
) -> None:
    """Write generated chats, one JSON object a line."""
    partial = out.with_name(out.name + ".tmp")
    with partial.open("w") as file:
        for document in documents(documents_count, seed, split, longest_tokens):
            file.write(json.dumps(document) + "\n")
    partial.replace(out)  # part of a text, by its own name, would be taken for all of it


if __name__ == "__main__":
    typer.run(main)
