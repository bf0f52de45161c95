"""Running one client request: all of its samples, from admission to the last byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from tpla.core.phases import Phase
from tpla.router import sse
from tpla.router.attempt import Attempt
from tpla.router.failures import LegFailure
from tpla.router.legs import Call, Event, members
from tpla.server.record import RequestRecord
from tpla.server.samples import (
    GenerationRequest,
    is_usage_chunk,
    merge_answers,
    merge_usage,
    renumber_chunk,
)
from tpla.server.service import Service

DONE_EVENT = sse.encode(sse.DONE)


class Generation:
    """A checked request on its way; whoever opens it closes it."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        path: str,
        headers: Mapping[str, str],
        record: RequestRecord,
    ) -> None:
        self._service = service
        self._request = request
        self._path = path
        self._headers = headers
        self._record = record
        self._attempts: dict[int, Attempt] = {}
        self._held = AsyncExitStack()

    async def open(self) -> None:
        """Wait for a place, dispatch every sample, and wait until each has its first event.

        Raises:
            RoutingError: there is no place or no worker, or a sample failed for good.
        """
        self._record.timeline.mark(Phase.QUEUED)
        weight = len(self._request.samples)
        await self._held.enter_async_context(self._service.admission.slot(weight))
        try:
            async with asyncio.TaskGroup() as group:
                for index, call in enumerate(self._calls()):
                    group.create_task(self._open_sample(index, call))
                    await asyncio.sleep(0)  # each copies the prompt: others have a turn between
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def answer(self) -> bytes:
        """The whole answer of a request that does not stream.

        Raises:
            RoutingError: a sample failed.
        """
        answers = [
            event for index in range(len(self._attempts)) for event in await self._next(index)
        ]
        if len(answers) == 1:
            return answers[0].raw
        bodies = [answer.body for answer in answers]
        return json.dumps(merge_answers(bodies, self._request.samples_per_prompt)).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream, up to and including ``[DONE]``; each piece is one event or several.

        Raises:
            RoutingError: a sample failed; the stream must not end as if it were whole.
        """
        if len(self._attempts) == 1:
            while events := await self._next(0):
                yield b"".join([event.raw for event in events])
        else:
            async for chunk in self._merged():
                yield sse.encode(json.dumps(chunk, ensure_ascii=False).encode())
        yield DONE_EVENT

    async def close(self) -> None:
        """Abort what is still running and give the place back."""
        async with self._held:
            await asyncio.gather(*[attempt.close() for attempt in self._attempts.values()])

    def _calls(self) -> list[Call]:
        limit = self._service.config.request_timeout_secs
        deadline = asyncio.get_running_loop().time() + limit
        model = self._service.registry.served_model or self._request.model
        named = members({"model": model} if model is not None else {})
        return [
            Call(
                path=self._path,
                body=(*sample.body, named),
                stream=self._request.stream,
                prompt=sample.prompt,
                deadline=deadline,
                time_limit=limit,
                headers=self._headers,
            )
            for sample in self._request.samples
        ]

    async def _open_sample(self, index: int, call: Call) -> None:
        dispatcher = self._service.dispatcher
        self._attempts[index] = await dispatcher.open(call, self._record.timeline)

    async def _next(self, index: int) -> list[Event]:
        try:
            return await self._attempts[index].next()
        except LegFailure as failure:
            raise failure.error from failure

    async def _merged(self) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of all samples as they come, numbered; one usage chunk at the end."""
        usages: dict[int, Mapping[str, Any]] = {}
        answer_id, last = "", {}  # type: str, Mapping[str, Any]
        waiting = {
            asyncio.create_task(self._next(index)): index for index in sorted(self._attempts)
        }
        try:
            while waiting:
                ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ready, key=lambda done: waiting[done]):
                    index = waiting.pop(task)
                    events = task.result()
                    if events:
                        waiting[asyncio.create_task(self._next(index))] = index
                    for last in [event.body for event in events]:
                        answer_id = answer_id or str(last.get("id"))
                        if is_usage_chunk(last):
                            usages[index] = last["usage"]
                        else:
                            yield renumber_chunk(last, index, answer_id)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if usages:
            ordered = [usages.get(index) for index in range(len(self._attempts))]
            usage = merge_usage(ordered, self._request.samples_per_prompt)
            yield {**last, "id": answer_id, "choices": [], "usage": usage}


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of samples that failed together, the first one's error."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
