"""Threads of peers that are gone, which take a moment to give back what they hold.

A process may not end before them: an interpreter that ends while a thread is inside torch aborts.
"""

from __future__ import annotations

import time
from typing import Protocol

_JOIN_SECONDS = 5.0
"""For all of them together."""


class Member(Protocol):
    """Has a thread that was told to end."""

    def join(self, timeout: float) -> bool:
        """Wait so many seconds for it; whether it has ended. Not from that thread."""


class Leaving:
    """Members on their way out; every call needs the lock of whoever owns it."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def add(self, member: Member) -> None:
        """One more; those that have ended since are forgotten."""
        self._members = [each for each in self._members if not each.join(0)]
        self._members.append(member)

    def take(self) -> list[Member]:
        """All of them, to wait for without the lock."""
        members, self._members = self._members, []
        return members


def join_all(members: list[Member]) -> None:
    """Wait for them, not for ever."""
    deadline = time.monotonic() + _JOIN_SECONDS
    for member in members:
        member.join(max(deadline - time.monotonic(), 0.0))
