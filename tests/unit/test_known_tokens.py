"""Tokens that the model does not have are refused where SGLang validates a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tpla.workers.sglang_plugin.known_tokens import refuse_unknown_tokens

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def validated(input_ids: list[int] | None, **sampling: Any) -> list[Any]:
    """What SGLang's own validation is called with."""
    calls: list[Any] = []
    request = SimpleNamespace(sampling_params=sampling)
    refuse_unknown_tokens(lambda *call: calls.append(call), MANAGER, request, input_ids)
    return calls


@pytest.mark.parametrize("token", [-1, 100, 1 << 40])
def test_a_token_that_is_not_there_is_named_with_the_limit(token: int) -> None:
    with pytest.raises(ValueError, match=f"prompt holds token {token}, .* tokens 0 to 99"):
        validated([0, token, 5])
    with pytest.raises(ValueError, match=f"stop_token_ids holds token {token}, .* tokens 0 to 99"):
        validated([0, 5], stop_token_ids=[7, token])


@pytest.mark.parametrize("input_ids", [[0, 99], [], None])
def test_all_others_are_left_to_sglang(input_ids: list[int] | None) -> None:
    assert len(validated(input_ids, stop_token_ids=None)) == 1
    assert len(validated(input_ids, stop_token_ids=[0, 99])) == 1
