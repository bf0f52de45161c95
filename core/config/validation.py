"""What the parsers of configuration share: bounded seconds, and errors in a user's words."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""A time-out: above zero, a day at most."""

_SECRETS = "api_key"


def explain(error: ValidationError) -> str:
    """Each bad value with its name and what is wrong; keys are masked."""
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        shown = "***" if _SECRETS in where else repr(item.get("input"))
        parts.append(f"{where}={shown}: {item['msg']}" if where else item["msg"])
    return "; ".join(parts)
