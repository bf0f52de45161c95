"""Whether decode answers held-out questions exactly, after an exact prefill of each question.

Greedy decoding says the whole expected answer if and only if each of its tokens, and the end of the
turn, is the most likely one after the expected ones before it. So one pass over question and
answer tells, without generating: the question's positions are exact, the answer's are decoded.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tpla.convert.calibrate import advance
from tpla.convert.evaluate import Subject, decode_layer
from tpla.convert.hidden_states import MEMORY_BYTES
from tpla.convert.reference.conversations import Question
from tpla.convert.sliced_attention import DecodeSpec, uninstall


@dataclass(frozen=True)
class Exchange:
    """A question with its only right answer.

    Attributes:
        ids_T: token ids of the prompt and of the answer with its end.
        prompt: tokens of the prompt.
    """

    ids_T: torch.Tensor
    prompt: int


def encode_exchange(tokenizer: Any, question: Question) -> Exchange:
    """The question through the tokenizer's chat template, then its answer and the end of a turn."""
    messages = [message.as_dict() for message in question.messages]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids, answer_ids = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for text in (prompt, question.answer + tokenizer.eos_token)
    )
    ids_T = torch.tensor(prompt_ids + answer_ids, dtype=torch.int64)
    return Exchange(ids_T, len(prompt_ids))


def exact_answers(
    subject: Subject,
    exchanges: Sequence[Exchange],
    spec: DecodeSpec,
    memory_bytes: int = MEMORY_BYTES,
) -> list[tuple[bool, bool]]:
    """For each question whether the model itself, and whether decode, answers exactly.

    Args:
        subject: the checkpoint; it is read once for every block of questions.
        exchanges: questions and answers.
        spec: how to decode; its ``prefill`` is replaced by each prompt's length.
        memory_bytes: of hidden states in memory; it bounds a block of questions.
    """
    model = subject.model
    token_bytes = 2 * int(model.config.hidden_size) * model.dtype.itemsize
    answers = []
    for block in blocks(exchanges, memory_bytes // token_bytes):
        answers += _answers(subject, block, spec, memory_bytes // 2)
    return answers


def blocks(exchanges: Sequence[Exchange], tokens: int) -> Iterator[list[Exchange]]:
    """Questions in order, at most ``tokens`` tokens of them together, but at least one."""
    block: list[Exchange] = []
    left = tokens
    for each in exchanges:
        if block and each.ids_T.shape[0] > left:
            yield block
            block, left = [], tokens
        block.append(each)
        left -= each.ids_T.shape[0]
    if block:
        yield block


@torch.no_grad()
def _answers(
    subject: Subject, exchanges: Sequence[Exchange], spec: DecodeSpec, memory_bytes: int
) -> list[tuple[bool, bool]]:
    """What :func:`exact_answers` gives, of one block; ``memory_bytes`` for each of two states."""
    model = subject.model
    exact = model.embed([each.ids_T for each in exchanges], memory_bytes)
    decoded = exact.copy()
    for index in range(model.layers):
        layer: Any = model.layer(index)
        subject.install(layer, index, spec)
        for position, each in enumerate(exchanges):
            layer.self_attn.forward.spec = replace(spec, prefill=each.prompt, scored_from=None)
            decoded[position] = decode_layer(
                model, layer, decoded[position], exact[position], each.prompt
            )
        uninstall(layer)
        advance(model, layer, exact)
        del layer
    head = model.head()
    answers = []
    for each, exact_TE, decoded_TE in zip(exchanges, exact, decoded, strict=True):
        # The prompt's last position predicts the answer's first token, and is prefill's.
        mixed_TE = torch.cat([exact_TE[: each.prompt], decoded_TE[each.prompt :]])
        answers.append((_is_exact(head, each, exact_TE), _is_exact(head, each, mixed_TE)))
    return answers


def _is_exact(head: nn.Module, exchange: Exchange, state_TE: torch.Tensor) -> bool:
    guessed_T = head(state_TE[exchange.prompt - 1 : -1]).argmax(-1).cpu()
    return torch.equal(guessed_T, exchange.ids_T[exchange.prompt :])
