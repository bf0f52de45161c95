"""The tokenizer (byte-level BPE, one token per digit), its chat template, and chat encoding."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tpla.convert.reference.conversations import Message

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD, BOS, END, *ROLES.values())  # their ids are 0, 1, 2, ...
PAD_ID, BOS_ID, END_ID = 0, 1, 2
TEXT_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0  # share of a token in the training loss

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Learn the merges from plain message texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {vocabulary_size}: "
            "give it more text or ask for fewer"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def render(messages: Sequence[Message]) -> str:
    """The text of a chat, equal to what the chat template makes of it."""
    parts = [f"{ROLES[m.role]}{m.content.strip()}{END}" for m in messages]
    return BOS + "".join(parts)


def encode_chats(
    tokenizer: Tokenizer, chats: Sequence[Sequence[Message]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each chat its token ids (uint16 [T]) and loss weights (float16 [T]).

    `weights[t]` is the weight of predicting token t from those before it.
    """
    contents = [message.content.strip() for chat in chats for message in chat]
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in contents)
    result = []
    for chat in chats:
        ids, weights = [BOS_ID], [0.0]
        for message in chat:
            content = next(encoded).ids
            weight = ANSWER_WEIGHT if message.role == "assistant" else TEXT_WEIGHT
            ids += [tokenizer.token_to_id(ROLES[message.role]), *content, END_ID]
            weights += [TEXT_WEIGHT, *[weight] * (len(content) + 1)]
        result.append((np.array(ids, dtype=np.uint16), np.array(weights, dtype=np.float16)))
    return result
