"""Requests that name tokens which the model does not have are refused.

SGLang 0.5.16 looks such a token up in the embedding, or in a batch's penalties, where the index
error ends the scheduler, and with it every request of the worker. Its own check of prompts, which
nothing there calls, would answer with the whole prompt, and it has none of stop tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def refuse_unknown_tokens(
    original: Any, manager: Any, obj: Any, input_ids: list[int] | None, *args: Any, **kwargs: Any
) -> None:
    """Around ``TokenizerManager._validate_one_request``.

    Raises:
        ValueError: which SGLang answers with status 400.
    """
    vocab_size = manager.model_config.vocab_size
    parameters = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    _check("prompt", input_ids or (), vocab_size)
    _check("stop_token_ids", parameters.get("stop_token_ids") or (), vocab_size)
    original(manager, obj, input_ids, *args, **kwargs)


def _check(where: str, tokens: Collection[int], vocab_size: int) -> None:
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{where} holds token {token}, and the model has tokens 0 to {vocab_size - 1}; "
                "was it made with another model's tokenizer?"
            )
