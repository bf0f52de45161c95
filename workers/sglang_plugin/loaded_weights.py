"""Weights stay those that were loaded.

Prefill and decode tell each other the fingerprint of their checkpoint. One that took other weights
in place would still tell the former, and its partner would serve wrong answers.
"""

from __future__ import annotations

from typing import Any

NO_UPDATE = (
    "weights cannot be updated in place: prefill and decode workers must have the same, and decode "
    "derives its own of them; convert the new checkpoint and start the workers anew with it"
)


def refuse_update(original: Any, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around each ``WeightUpdater.update_weights_from_*``: SGLang answers with the message."""
    return False, NO_UPDATE
