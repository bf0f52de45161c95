"""The digest by which prefill and decode see that they compute the same model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tpla.workers.sglang_plugin.model_settings import settings_digest

SETTINGS = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 4096,
}


def digest(**changes: Any) -> str:
    config = SimpleNamespace(**{**SETTINGS, **changes})
    return settings_digest(SimpleNamespace(hf_text_config=config))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_scaling": {"factor": 40, "mscale": 1.0}},
        {"routed_scaling_factor": 2.5},
    ],
)
def test_what_changes_rows_changes_the_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_what_may_differ_between_roles_does_not_count() -> None:
    reordered = {"rope_type": "default", "rope_theta": 10000.0}
    assert digest(max_position_embeddings=8192, rope_parameters=reordered) == digest()
