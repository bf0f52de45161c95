"""Text for calibration and evaluation, cut into token sequences.

Shape suffixes: T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tpla.core.errors import CheckpointError, ConfigError

DEFAULT_CONTEXT = 2048

HELD_OUT_EVERY = 4
"""Of sequences that are also to be judged on, every fourth is not fitted."""

_BOS_BY_FLAG = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_Document = str | list[dict[str, Any]]
_CHARS_PER_TOKEN = 16
"""No more characters than this a wanted token are read of a plain text."""


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer that lies in a checkpoint, which begins a text as the served one does.

    Args:
        directory: of the checkpoint.
        trust_remote_code: run code that lies there, too, as Kimi-K2's tokenizer needs.

    Raises:
        CheckpointError: none, or one that needs code that is not trusted.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        own_code = "custom code" in first_line and not trust_remote_code
        remedy = "; if you trust it, give --trust-remote-code" if own_code else ""
        raise CheckpointError(
            f"no usable tokenizer in {directory}: {first_line}{remedy}"
        ) from error
    _restore_bos(tokenizer, directory / "tokenizer_config.json")
    return tokenizer


def _restore_bos(tokenizer: Any, config: Path) -> None:
    """Transformers 5 drops ``add_bos_token`` where a tokenizer.json is; DeepSeek-V3's does not add
    the token by itself. SGLang restores the flag in the same way."""
    if not config.is_file():
        return
    settings = json.loads(config.read_text())
    if settings.get("tokenizer_class") in _BOS_BY_FLAG and settings.get("add_bos_token", True):
        tokenizer._add_bos_token = True
        tokenizer.update_post_processor()


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a plain text, by the tokenizer of a checkpoint."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def sequence_context(config: dict[str, Any], context: int | None) -> int:
    """Tokens of a sequence: as asked, or a default that the model can take.

    Raises:
        ConfigError: less than 2, or more positions than the model has.
    """
    limit = int(config.get("max_position_embeddings", DEFAULT_CONTEXT))
    if context is None:
        return min(DEFAULT_CONTEXT, limit)
    if not 2 <= context <= limit:
        raise ConfigError(f"context={context} is not in 2..{limit} (max_position_embeddings)")
    return context


def read_sequences(
    path: Path, tokenizer: Any, context: int, max_tokens: int, per_document: bool = False
) -> list[torch.Tensor]:
    """Tokenise a file and cut it into sequences of ``context`` tokens; the last may be shorter.

    Each document begins as the tokenizer begins a text (most put a BOS token). Those of a
    ``.jsonl`` follow one another without a gap, unless ``per_document``: then each is cut alone,
    as chats are served. Other files are one document.

    Args:
        path: ``.jsonl`` with "text" or "messages" in every line, or plain text.
        tokenizer: of the model.
        context: tokens of a sequence.
        max_tokens: stop after so many tokens.
        per_document: whether a document begins a new sequence.

    Returns:
        int64 ``[T]`` tensors of at least two tokens.

    Raises:
        ConfigError: unreadable file or line, or fewer than two tokens.
    """
    texts: list[list[int]] = [[]]
    left = max_tokens
    for place, document in _documents(path, max_tokens):
        ids = _encode(place, tokenizer, document)[:left]
        left -= len(ids)
        if per_document:
            texts.append(ids)
        else:
            texts[0] += ids
        if not left:
            break
    parts = [ids[i : i + context] for ids in texts for i in range(0, len(ids), context)]
    sequences = [torch.tensor(part, dtype=torch.int64) for part in parts if len(part) >= 2]
    if not sequences:
        raise ConfigError(f"{path} holds {max_tokens - left} tokens; give a longer text")
    return sequences


def hold_out(sequences: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Which sequences (or what was made of them) to fit on, and which to judge by.

    Raises:
        ConfigError: too few for both.
    """
    if len(sequences) < HELD_OUT_EVERY:
        raise ConfigError(
            f"{len(sequences)} calibration sequences hold none out: every {HELD_OUT_EVERY}th is "
            "kept to judge by; give more --max-tokens or text, or a smaller --context"
        )
    numbers = range(len(sequences))
    kept = [number for number in numbers if number % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return kept, list(numbers[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def _documents(path: Path, max_tokens: int) -> Iterator[tuple[str, _Document]]:
    """Each document, and where it lies, for messages."""
    try:
        with path.open(encoding="utf-8") as handle:
            if path.suffix != ".jsonl":
                yield str(path), handle.read(max_tokens * _CHARS_PER_TOKEN)
                return
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse(f"{path}:{number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read text {path}: {error}") from error


def _parse(place: str, line: str) -> _Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON ({error}); correct or remove the line") from error
    text, messages = None, None
    if isinstance(record, dict):
        text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str):
        return text
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(
            f'{place} has neither "text" nor "messages" (a string; a list of objects); correct or '
            "remove the line"
        )
    if not messages:
        raise ConfigError(f'{place} has "messages" without any; correct or remove the line')
    return messages


def _encode(place: str, tokenizer: Any, document: _Document) -> list[int]:
    plain = isinstance(document, str)
    if not plain and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f'{place} has "messages" but the tokenizer has no chat template; use "text"'
        )
    try:
        if plain:
            return list(tokenizer(document, verbose=False)["input_ids"])
        rendered = tokenizer.apply_chat_template(document, tokenize=False)
        # The template writes the special tokens itself.
        return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:  # a template is a program of the model's, and may fail in any way
        raise ConfigError(
            f"{place}: the tokenizer or its chat template fails on it "
            f"({type(error).__name__}: {error}); correct or remove it"
        ) from error
