"""Work that outlives the request it belongs to: aborts, and prefill legs that still finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Keeps a reference to each task until it ends; the tasks have time-outs of their own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work``, which must handle its own errors."""
        self.adopt(asyncio.create_task(work))

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that is already running."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float) -> None:
        """Wait for all tasks, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
