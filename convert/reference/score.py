"""Score a checkpoint on held-out questions, greedily, through HuggingFace transformers.

Run `python -m tpla.convert.reference.score deploy/reference_model --json FILE`.
"""

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, DeepseekV2ForCausalLM

from tpla.convert.reference import latent
from tpla.convert.reference.checkpoint import load_checkpoint
from tpla.convert.reference.conversations import (
    Message,
    Question,
    draw_conversation,
    recall_question,
)
from tpla.convert.reference.facts import Split
from tpla.convert.reference.questions import (
    NO_END,
    RECALL_DISTANCES,
    TASK_KINDS,
    TEST_SEED,
    Reply,
    recall_questions,
    summary,
    task_questions,
)
from tpla.convert.reference.tokenizer import ANSWER_WEIGHT, encode_chats


class HuggingFaceModel:
    """The checkpoint as transformers loads it, in float32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(device).eval()
        self.tokenizer.padding_side = "left"

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a plain text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, question: Question) -> str:
        """The question through the chat template."""
        messages = [m.as_dict() for m in question.messages]
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    @torch.no_grad()
    def reply(self, questions: Sequence[Question], batch: int) -> list[Reply]:
        """Greedy replies, longest prompts first."""
        prompts = [self.prompt(q) for q in questions]
        order = sorted(range(len(questions)), key=lambda i: -len(prompts[i]))
        replies = []
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = self.tokenizer(
                [prompts[i] for i in chosen],
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
                return_token_type_ids=False,
            ).to(self.device)
            longest = max(self.count_tokens(questions[i].answer) for i in chosen)
            out = self.model.generate(**inputs, max_new_tokens=longest + 2, do_sample=False)
            new = out[:, inputs["input_ids"].shape[1] :]
            lengths = inputs["attention_mask"].sum(-1).tolist()
            for i, ids, length in zip(chosen, new.tolist(), lengths, strict=True):
                replies.append(Reply(questions[i], self._text(ids), int(length)))
        return replies

    def _text(self, ids: list[int]) -> str:
        """The reply up to the end-of-turn token; marked when that never came."""
        end = self.tokenizer.eos_token_id
        stop = ids.index(end) if end in ids else len(ids)
        text: str = self.tokenizer.decode(ids[:stop])
        return text if end in ids else text + NO_END


def encoded_chats(tokenizer: Tokenizer, seed: str, count: int) -> list[latent.EncodedChat]:
    """Held-out chats of at most 2000 tokens for perplexity."""
    rng = Random(seed)
    chats = [draw_conversation(rng, Split.TEST, longest_tokens=1800) for _ in range(count)]
    return [
        latent.EncodedChat(
            torch.from_numpy(ids[:2000].astype("int64")),
            torch.from_numpy((weights[:2000] == ANSWER_WEIGHT).astype("float32")),
        )
        for ids, weights in encode_chats(tokenizer, chats)
    ]


def encoded_recall(tokenizer: Tokenizer, seed: str, count: int) -> list[latent.EncodedChat]:
    """Held-out recall questions over 600 tokens with their answers, which alone have weight."""
    rng = Random(seed)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    chats = []
    for _ in range(count):
        question = recall_question(rng, 600, count_tokens)
        chats.append([*question.messages, Message("assistant", question.answer)])
    encoded = []
    for chat, (ids, _) in zip(chats, encode_chats(tokenizer, chats), strict=True):
        weights = torch.zeros(len(ids))
        weights[-count_tokens(chat[-1].content) - 1 :] = 1.0
        encoded.append(latent.EncodedChat(torch.from_numpy(ids.astype("int64")), weights))
    return encoded


def latent_report(folder: Path, device: torch.device, chats: int) -> dict[str, object]:
    """Sliced perplexities and spectra of the checkpoint in `folder`."""
    model = load_checkpoint(folder, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seed = f"{TEST_SEED}/latent"
    sets = (
        encoded_chats(tokenizer, f"{seed}/calibration", chats),
        encoded_chats(tokenizer, f"{seed}/test", chats),
        encoded_recall(tokenizer, f"{seed}/recall", 4 * chats),
    )
    calibration, test, recall = (
        [latent.EncodedChat(c.tokens.to(device), c.weights.to(device)) for c in chosen]
        for chosen in sets
    )
    return latent.report(model, calibration, test, recall)


def score(
    folder: Path, device: torch.device, questions: int, batch: int, latent_chats: int
) -> dict[str, object]:
    """All figures of the checkpoint in `folder`."""
    started = time.monotonic()
    model = HuggingFaceModel(folder, device)
    recall = {}
    for distance in RECALL_DISTANCES:
        asked = recall_questions(model.count_tokens, distance, questions)
        recall[str(distance)] = summary(model.reply(asked, batch))
        typer.echo(f"recall {distance}: {recall[str(distance)]['exact']}")
    by_kind = {}
    for kind in TASK_KINDS:
        by_kind[kind] = summary(model.reply(task_questions(kind, questions), batch))
        typer.echo(f"{kind}: {by_kind[kind]['exact']}")
    return {
        "dtype": "float32 from bf16 weights",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "recall_by_distance": recall,
        "tasks": by_kind,
        "latent": latent_report(folder, device, latent_chats),
        "seconds": round(time.monotonic() - started, 1),
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Where to write figures.")] = None,
    questions: Annotated[int, typer.Option(help="Questions of each kind and distance.")] = 200,
    batch: Annotated[int, typer.Option(help="Questions answered at once.")] = 50,
    latent_chats: Annotated[int, typer.Option(help="Chats for the sliced perplexities.")] = 40,
) -> None:
    """Score a checkpoint of the reference model on held-out questions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = score(folder, device, questions, batch, latent_chats)
    text = json.dumps(figures, indent=2) + "\n"
    typer.echo(text)
    if json_out is not None:
        json_out.write_text(text)


if __name__ == "__main__":
    typer.run(main)
