"""Shared cores that differ by layer: bytes go to the layers that lose most without them.

Measuring every plan with one core for all layers (:mod:`~tpla.convert.planning`) yields each
layer's error under each core. From the smallest core everywhere, the step to a larger core of one
layer is taken that lowers the summed error most a byte, until no step fits. That sum only orders
the plans: a division is served only if, measured, it loses less than one core for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpla.convert.pipeline import ConversionOptions, Progress
from tpla.convert.planning import (
    Budget,
    Candidate,
    choose,
    list_candidates,
    measure_candidates,
    survey,
    within_bytes,
)
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import ModelPlan

DIVISIONS_TRIED = 6
"""Divisions that are measured for a limit of the KL, evenly spaced in bytes."""


@dataclass(frozen=True)
class Choice:
    """What a budget chose.

    Attributes:
        candidates: one core for all layers, smallest first; measured unless asked not to divide.
        uniform: the best of them within the budget.
        divisions: divisions by layer that were measured, smallest first.
        chosen: what to convert.
    """

    candidates: list[Candidate]
    uniform: Candidate
    divisions: list[Candidate]
    chosen: Candidate


def choose_plan(
    source: Path,
    options: ConversionOptions,
    budget: Budget,
    uniform: bool = False,
    measured: bool = False,
    progress: Progress = lambda *_: None,
) -> Choice:
    """The plan for a budget, divided by layer where that measures better.

    Args:
        source: the checkpoint that would be converted.
        options: how; their core_dims are what is looked for.
        budget: at least one limit; bytes are a rank's mean of a token and layer.
        uniform: whether all layers must have the same core.
        measured: whether to measure where the choice does not need it, too.
        progress: called with stage, parts done, parts in all.

    Raises:
        CheckpointError: not a model with latent attention.
        ConfigError: no plan is within the budget, or text to measure on is absent or too short.
    """
    possible = list_candidates(source, options.groups, budget)
    within_bytes(possible, budget)  # refused here, and not after the measuring
    divides = not uniform and len(possible) > 1
    if divides and options.calibration is None:
        raise ConfigError(
            f"bytes_per_token={budget.bytes_per_token}, max_kl={budget.max_kl}: dividing a budget "
            "by layer needs text to measure on; give --calibration PATH, or --uniform"
        )
    candidates = survey(source, options, budget, progress, measured or divides)
    best = choose(candidates, budget)
    plans = _divisions(candidates, best, budget) if divides else []
    if not plans:
        return Choice(candidates, best, [], best)
    found = [Candidate.of(source, plan, budget.kv_format) for plan in plans]
    divisions = measure_candidates(source, options, found, budget.kv_format, progress)
    return Choice(candidates, best, divisions, _better(best, divisions, budget))


def divide_by_layer(candidates: Sequence[Candidate], token_bytes: float) -> ModelPlan:
    """The division of ``token_bytes``, all layers together, that the layers' errors ask for.

    Args:
        candidates: one core for all layers each, measured, smallest first.
        token_bytes: a rank's rows of one token, at most; no less than the first candidate's.
    """
    errors = [c.measure.layer_errors for c in candidates if c.measure is not None]
    costs = [candidate.row_bytes for candidate in candidates]
    layers = range(len(errors[0]))
    steps = [0 for _ in layers]

    def gain(step: tuple[int, int]) -> float:
        """Fall of the summed error a byte."""
        layer, to = step
        fall = errors[steps[layer]][layer] - errors[to][layer]
        return fall / (costs[to] - costs[steps[layer]])

    while True:
        left = token_bytes - sum(costs[step] for step in steps)
        fitting = [
            (layer, to)
            for layer in layers
            for to in range(steps[layer] + 1, len(costs))
            if costs[to] - costs[steps[layer]] <= left
        ]
        best = max(fitting, key=gain, default=None)
        if best is None or gain(best) <= 0:
            break
        steps[best[0]] = best[1]
    plan = candidates[0].plan
    core_dims = tuple(candidates[step].plan.core_dims[layer] for layer, step in enumerate(steps))
    return ModelPlan(plan.kv_lora_rank, plan.groups, core_dims)


def _divisions(
    candidates: Sequence[Candidate], uniform: Candidate, budget: Budget
) -> list[ModelPlan]:
    """Divisions that may beat the chosen core for all layers, smallest first."""
    layers = uniform.plan.num_layers
    if budget.max_kl is None:
        assert budget.bytes_per_token is not None
        limits: list[float] = [budget.bytes_per_token * layers]
    else:
        least = candidates[0].token_bytes
        span = (uniform.token_bytes - least) / DIVISIONS_TRIED
        limits = [least + span * number for number in range(1, DIVISIONS_TRIED + 1)]
    plans = dict.fromkeys(divide_by_layer(candidates, limit) for limit in limits)
    return [plan for plan in plans if not plan.is_uniform]


def _better(uniform: Candidate, divisions: Sequence[Candidate], budget: Budget) -> Candidate:
    """By bytes the one that loses less; by KL the smallest that meets it."""
    if budget.max_kl is None:
        return min([uniform, *divisions], key=lambda candidate: candidate.kl)
    meeting = [candidate for candidate in divisions if candidate.kl <= budget.max_kl]
    return min([uniform, *meeting], key=lambda candidate: candidate.token_bytes)
