"""One client request as single samples, and their answers as one.

SGLang 0.5.16 cannot generate n > 1 with prefill/decode disaggregation: it first sends one request
per prompt to warm the cache and then n copies, all with the room of the first, so that the rooms
collide. It can take a list of prompts with a list of rooms, but then answers, fails and is aborted
as a whole. The router therefore sends every sample as a request of its own, with its own room, id,
workers and retries, and merges the answers: choices are numbered prompt by prompt, usage counts a
prompt once however many samples it has, and with a seed sample i gets ``seed + i``.

Answers do not repeat by a seed yet: SGLang 0.5.16 samples by one only under
``--enable-deterministic-inference``, which it refuses with decode's attention backends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpla.router.admission import refuse_too_many
from tpla.router.legs import members
from tpla.server.openai_protocol import (
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    parse,
    split_prompts,
    without_nulls,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_PROMPT_KEY_CHARS = 128 * 1024
"""More of a prompt than this does not sway the choice of a worker."""

_SUMMED = ("completion_tokens", "reasoning_tokens")
_ONCE_PER_PROMPT = ("prompt_tokens",)


@dataclass(frozen=True)
class Sample:
    """One prompt to be answered once."""

    body: Sequence[bytes]
    """Members of the request's object (:func:`~tpla.router.legs.members`), but for the model; what
    is not this sample's alone is the same bytes in others."""
    prompt: str
    """Its beginning as text."""


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request."""

    samples: Sequence[Sample]
    samples_per_prompt: int
    stream: bool
    model: str | None


def parse_chat(body: dict[str, Any], max_samples: int) -> GenerationRequest:
    """Check a chat request and split it.

    Raises:
        BadRequest: it is malformed, or asks for more than ``max_samples``.
    """
    body = without_nulls(body)
    request = parse(ChatRequest, body)
    refuse_too_many(request.n, max_samples)
    prompt = _chat_prompt(body)
    shared = members(_shared(body))
    samples = [Sample((shared, _seed(request.seed, i)), prompt) for i in range(request.n)]
    return GenerationRequest(samples, request.n, request.stream, request.model)


def parse_completion(body: dict[str, Any], max_samples: int) -> GenerationRequest:
    """Check a completion request and split it.

    Raises:
        BadRequest: it is malformed, or asks for more than ``max_samples``.
    """
    body = without_nulls(body)
    request = parse(CompletionRequest, body)
    prompts = split_prompts(request.prompt)
    # Before any is built: a body of 4 MB may ask for 128 million.
    refuse_too_many(len(prompts) * request.n, max_samples)
    shared = members(_shared(body))
    samples: list[Sample] = []
    for prompt in prompts:
        start = prompt[:_PROMPT_KEY_CHARS]
        text = start if isinstance(start, str) else json.dumps(start)[:_PROMPT_KEY_CHARS]
        own = members({"prompt": prompt})
        for _ in range(request.n):
            samples.append(Sample((shared, own, _seed(request.seed, len(samples))), text))
    return GenerationRequest(samples, request.n, request.stream, request.model)


def merge_answers(answers: Sequence[Mapping[str, Any]], samples_per_prompt: int) -> dict[str, Any]:
    """One answer with a choice for each sample."""
    merged = dict(answers[0])
    merged["choices"] = [
        {**choice, "index": index}
        for index, answer in enumerate(answers)
        for choice in answer.get("choices") or ()
    ]
    usages = [answer.get("usage") for answer in answers]
    merged["usage"] = merge_usage(usages, samples_per_prompt)
    return merged


def merge_usage(
    usages: Iterable[Mapping[str, Any] | None], samples_per_prompt: int
) -> dict[str, Any]:
    """Tokens of all samples; those of a prompt count once."""
    present = [usage or {} for usage in usages]
    firsts = present[::samples_per_prompt]
    merged: dict[str, Any] = {}
    for name in _ONCE_PER_PROMPT:
        merged[name] = sum(usage.get(name) or 0 for usage in firsts)
    for name in _SUMMED:
        merged[name] = sum(usage.get(name) or 0 for usage in present)
    merged["total_tokens"] = merged["prompt_tokens"] + merged["completion_tokens"]
    cached = [usage.get("prompt_tokens_details") for usage in firsts]
    if any(cached):
        total = sum((details or {}).get("cached_tokens") or 0 for details in cached)
        merged["prompt_tokens_details"] = {"cached_tokens": total}
    return merged


def renumber_chunk(chunk: Mapping[str, Any], index: int, answer_id: str) -> dict[str, Any]:
    """A chunk of sample ``index``, as part of the merged stream."""
    choices = [{**choice, "index": index} for choice in chunk.get("choices") or ()]
    return {**chunk, "id": answer_id, "choices": choices}


def is_usage_chunk(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk is the one that reports usage at the end of a stream."""
    return not chunk.get("choices") and bool(chunk.get("usage"))


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the requests of all samples hold of ``body``."""
    dropped = WITHOUT_EFFECT | {"n", "best_of", "rid", "modalities", "model", "prompt", "seed"}
    shared = {name: value for name, value in body.items() if name not in dropped}
    options = shared.get("stream_options")
    if options is not None:
        shared["stream_options"] = {
            name: value for name, value in options.items() if name != "include_obfuscation"
        }
    return shared


def _seed(seed: int | None, index: int) -> bytes:
    """The seed of a sample as a member; nothing where none was asked for."""
    if seed is None:
        return b""
    return members({"seed": (seed + index + 2**63) % 2**64 - 2**63})  # wraps like an int64


def _chat_prompt(body: Mapping[str, Any]) -> str:
    """The conversation as text: equal beginnings of conversations give equal beginnings."""
    if "input_ids" in body:
        return json.dumps(body["input_ids"][:_PROMPT_KEY_CHARS])[:_PROMPT_KEY_CHARS]
    parts = [json.dumps(body["tools"], sort_keys=True)] if body.get("tools") else []
    size = 0
    for message in body["messages"]:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        parts.append(f"{message['role']}\n{text}")
        size += len(text)
        if size > _PROMPT_KEY_CHARS:
            break
    return "\n".join(parts)[:_PROMPT_KEY_CHARS]
