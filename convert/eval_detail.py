"""Where a way to decode departs from the exact model: by position, by distance read, by layer.

Means over a text hide which tokens pay. Here agreement and divergence are given for ranges of
positions, and for ranges of the distance that a position attends over: the exact model's
probability-weighted distance from query to key, mean over heads and layers. Each layer's error is
that of its attention alone, on the exact model's inputs.

Shape suffixes: T tokens, K keys, H heads, R latent dims, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tpla.convert.calibrate import advance
from tpla.convert.evaluate import (
    ROWS_AT_ONCE,
    Subject,
    advance_decoded,
    check_scorable,
    divergence,
)
from tpla.convert.hidden_states import MEMORY_BYTES, HiddenStates
from tpla.convert.layers import LayeredModel
from tpla.convert.sliced_attention import (
    DecodeSpec,
    attention_error,
    mask_future,
    project,
    query_blocks,
    uninstall,
    up_projections,
)

POSITION_RANGES = 8


@dataclass(frozen=True)
class Range:
    """Scored positions of one range.

    Attributes:
        start: its least position or distance, tokens.
        stop: the first beyond it.
        tokens: scored positions in it.
        kl: mean KL(exact || this), nats.
        top1: share of positions where the most likely token is the exact model's.
    """

    start: int
    stop: int
    tokens: int
    kl: float
    top1: float


@dataclass(frozen=True)
class Detail:
    """One way to decode on one text.

    Attributes:
        by_position: equal ranges of the scored positions.
        by_distance: ranges of the distance attended over, each twice as wide as the one before.
        layer_errors: per layer, the squared error of the attention output over its energy, each
            layer alone, on the exact model's inputs.
    """

    by_position: list[Range]
    by_distance: list[Range]
    layer_errors: list[float]


@torch.no_grad()
def evaluate_detail(
    subject: Subject,
    sequences: Sequence[torch.Tensor],
    spec: DecodeSpec,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Detail:
    """Measure one way to decode, range by range and layer by layer.

    Args:
        subject: the checkpoint.
        sequences: token ids ``[T]`` each.
        spec: the way to decode.
        progress: called with stage, parts done, parts in all.

    Raises:
        ConfigError: no sequence is longer than what the spec does not score.
    """
    check_scorable(sequences, spec)
    model = subject.model
    exact = model.embed(sequences, MEMORY_BYTES // 2)
    decoded = exact.copy()
    distances = [torch.zeros(len(ids), device=model.device) for ids in sequences]
    layer_errors = []
    for index in range(model.layers):
        progress("layers", index, model.layers)
        layer: Any = model.layer(index)
        for distance_T, hidden_TE in zip(distances, exact, strict=True):
            distance_T += attended_distance(model, layer, hidden_TE) / model.layers
        subject.install(layer, index, spec)
        layer_errors.append(attention_error(model, layer, exact))
        advance_decoded(model, layer, decoded, exact, spec)
        uninstall(layer)
        advance(model, layer, exact)
        del layer
    progress("layers", model.layers, model.layers)
    scored = _score(model.head(), exact, decoded, distances, spec.first_scored)
    return Detail(*_ranges(scored, spec.first_scored), layer_errors)


def attended_distance(model: LayeredModel, layer: Any, hidden_TE: torch.Tensor) -> torch.Tensor:
    """Probability-weighted distance from each query to its keys, mean over heads, ``[T]``.

    Args:
        model: whose layer it is.
        layer: a decoder layer.
        hidden_TE: its input, one sequence.
    """
    attention, tokens = layer.self_attn, hidden_TE.shape[0]
    seen = project(attention, layer.input_layernorm(hidden_TE), model.rotary(tokens))
    query_HTR = seen.q_nope_HTN @ up_projections(attention)[0]
    positions_K = torch.arange(tokens, device=hidden_TE.device)
    parts = []
    for block in query_blocks(attention.num_heads, tokens, tokens):
        logits = query_HTR[:, block] @ seen.latent_TR.T
        logits = logits + seen.q_rope_HTD[:, block] @ seen.rope_TD.T
        probs = mask_future((logits * attention.scaling).float(), positions_K[block]).softmax(-1)
        parts.append(positions_K[block] - (probs @ positions_K.float()).mean(0))
    return torch.cat(parts)


@dataclass(frozen=True)
class _Scored:
    """Every scored position: where it is, over what distance it attends, how it fared."""

    position_T: torch.Tensor
    distance_T: torch.Tensor
    kl_T: torch.Tensor
    agreed_T: torch.Tensor

    def range(self, chosen_T: torch.Tensor, start: int, stop: int) -> Range:
        tokens = int(chosen_T.sum())
        kl, agreed = self.kl_T[chosen_T], self.agreed_T[chosen_T].double()
        return Range(start, stop, tokens, float(kl.mean()), float(agreed.mean()))


def _score(
    head: nn.Module,
    exact: HiddenStates,
    decoded: HiddenStates,
    distances: Sequence[torch.Tensor],
    first: int,
) -> _Scored:
    parts: list[tuple[torch.Tensor, ...]] = []
    for exact_TE, decoded_TE, distance_T in zip(exact, decoded, distances, strict=True):
        last = exact_TE.shape[0] - 1
        for start in range(first, last, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, last))
            exact_TV = head(exact_TE[rows]).float().log_softmax(-1)
            own_TV = head(decoded_TE[rows]).float().log_softmax(-1)
            kl_T, agreed_T = divergence(exact_TV, own_TV)
            position_T = torch.arange(rows.start, rows.stop, device=kl_T.device)
            parts.append((position_T, distance_T[rows], kl_T, agreed_T))
    return _Scored(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _ranges(scored: _Scored, first: int) -> tuple[list[Range], list[Range]]:
    """Ranges by position and by distance, without those that hold no token."""
    stop = int(scored.position_T.max()) + 1
    bounds = [
        first + (stop - first) * part // POSITION_RANGES for part in range(POSITION_RANGES + 1)
    ]
    doubling = [0, 1]
    while doubling[-1] <= float(scored.distance_T.max()):
        doubling.append(2 * doubling[-1])
    return _cut(scored, scored.position_T, bounds), _cut(scored, scored.distance_T, doubling)


def _cut(scored: _Scored, by_T: torch.Tensor, bounds: Sequence[int]) -> list[Range]:
    found = []
    for start, stop in pairwise(bounds):
        chosen_T = (by_T >= start) & (by_T < stop)
        if chosen_T.any():
            found.append(scored.range(chosen_T, start, stop))
    return found
