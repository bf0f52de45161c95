"""A grammar that fails when it is used fails its own request, not the scheduler.

SGLang 0.5.16 answers a grammar that cannot be compiled with status 400. llguidance finds some
errors only with the first mask of allowed tokens (a schema that refers to nothing but itself), or
with a later one (its limits), and there SGLang raises in the scheduler's loop, which ends it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar

logger = logging.getLogger(__name__)

_EVERY_TOKEN = -1
"""A word of a mask in which every bit is set."""


def refuse_without_first_mask(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``GuidanceBackend._from_serialized``: SGLang answers 400 with the error."""
    grammar = original(backend, *args, **kwargs)
    if isinstance(grammar, GuidanceGrammar):
        trial = grammar.copy()
        trial.fill_vocab_mask(trial.allocate_vocab_mask(0, 1, "cpu"), 0)
        if trial.ll_matcher.is_error():
            return InvalidGrammarObject(trial.ll_matcher.get_error())
    return grammar


def allow_all_after_an_error(
    original: Any, grammar: Any, vocab_mask: torch.Tensor, idx: int
) -> None:
    """Around ``GuidanceGrammar.fill_vocab_mask``.

    Whatever token is sampled then, the grammar refuses it, and SGLang aborts the request.
    """
    try:
        original(grammar, vocab_mask, idx)
    except ValueError as error:
        logger.warning("a grammar failed, and its request will: %s", error)
        vocab_mask[idx] = _EVERY_TOKEN
