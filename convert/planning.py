"""Which shared core a budget allows: bytes of a cached row, or divergence from the exact model.

For a number of groups the plans differ in ``core_dims`` alone, here the same for all layers (how
they are divided by layer: :mod:`~tpla.convert.division`). All of them are measured in one pass
over the layers: the basis and the exact hidden states are the same for every plan, so a layer is
read once, and only the fits and each plan's own hidden states are kept beside it. The KL is that of
held-out sequences, every fourth of the calibration text, after an exact prefill
of half a context. A learned basis is another one for every plan, so plans for it are measured in
the principal one that it begins at.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any

import torch

from tpla.convert.alignment import Alignment
from tpla.convert.calibrate import Recipe, advance, fit_decode, rotate_layer
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.evaluate import advance_decoded, score_states
from tpla.convert.hidden_states import HiddenStates
from tpla.convert.layers import LayeredModel
from tpla.convert.pipeline import (
    ConversionOptions,
    Progress,
    calibration_sequences,
    latent_rank,
    make_recipe,
)
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import (
    DecodeSpec,
    Mode,
    attention_error,
    uninstall,
)
from tpla.convert.text import hold_out, sequence_context
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan

WIDTH_MULTIPLE = 16
"""Rank widths that Hopper's bulk copies of FP8 rows take."""


@dataclass(frozen=True)
class Budget:
    """What a plan may cost.

    Attributes:
        kv_format: format of the cached rows.
        bytes_per_token: most bytes of a rank's row, one token and layer, mean over the layers;
            None: no limit.
        max_kl: most mean KL to the exact model, nats; None: no limit.
        width_multiple: widths of a rank's latent are multiples of it.

    Raises:
        ConfigError: a multiple below 1, or a KL that is not above 0.
    """

    kv_format: KVFormat = KVFormat.FP8
    bytes_per_token: int | None = None
    max_kl: float | None = None
    width_multiple: int = WIDTH_MULTIPLE

    def __post_init__(self) -> None:
        if self.width_multiple < 1:
            raise ConfigError(f"width_multiple={self.width_multiple} must be at least 1")
        if self.max_kl is not None and not self.max_kl > 0:  # nan, too
            raise ConfigError(
                f"max_kl={self.max_kl:g} must be more than 0, which only the exact model has; "
                "give as many nats as you accept, e.g. 0.003"
            )

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.bytes_per_token is not None or self.max_kl is not None


@dataclass(frozen=True)
class PlanMeasure:
    """What a plan loses on held-out text.

    Attributes:
        kl: mean KL(exact || decode), nats.
        ppl_ratio: perplexity over the exact model's.
        top1: share of positions where the most likely token is the exact model's.
        layer_errors: per layer, the squared error of the attention output over its energy, each
            layer fed the exact hidden states.
    """

    kl: float
    ppl_ratio: float
    top1: float
    layer_errors: list[float]


@dataclass(frozen=True)
class Candidate:
    """A plan, its cost, and what it loses (None: not measured).

    Attributes:
        plan: the division of the latent.
        token_bytes: a rank's rows of one token, all layers.
        measure: what it loses.
    """

    plan: ModelPlan
    token_bytes: int
    measure: PlanMeasure | None = None

    @classmethod
    def of(cls, source: Path, plan: ModelPlan, kv_format: KVFormat) -> Candidate:
        """A plan for a checkpoint, not measured."""
        rope = int(Checkpoint(source).config["qk_rope_head_dim"])
        return cls(plan, CacheLayout(plan, 0, rope, kv_format).token_bytes)

    @property
    def row_bytes(self) -> float:
        """A rank's row, one token and layer, mean over the layers."""
        return self.token_bytes / self.plan.num_layers

    @property
    def kl(self) -> float:
        """Mean KL(exact || decode) of a candidate that was measured."""
        assert self.measure is not None
        return self.measure.kl


def list_candidates(source: Path, groups: int, budget: Budget) -> list[Candidate]:
    """Every plan of ``groups`` whose widths the kernels like, smallest core first.

    Raises:
        CheckpointError: not a model with latent attention.
        ConfigError: there is no such plan.
    """
    checkpoint = Checkpoint(source)
    rank, layers = latent_rank(checkpoint), int(checkpoint.config["num_hidden_layers"])
    found = []
    for core_dims in range(rank if groups > 1 else 1):
        if groups < 1 or rank - core_dims < groups or (rank - core_dims) % groups:
            continue
        plan = ModelPlan(rank, groups, (core_dims,) * layers)
        if plan.layer(0).latent_width % budget.width_multiple == 0:
            found.append(Candidate.of(source, plan, budget.kv_format))
    if not found:
        raise ConfigError(
            f"no plan of groups={groups} divides kv_lora_rank={rank} into widths that are "
            f"multiples of {budget.width_multiple}; lower --width-multiple or --groups"
        )
    return found


def within_bytes(candidates: Sequence[Candidate], budget: Budget) -> list[Candidate]:
    """The candidates whose rows are no larger than a budget's; needs no measure of them.

    Raises:
        ConfigError: there are none.
    """
    limit = budget.bytes_per_token
    found = [c for c in candidates if limit is None or c.row_bytes <= limit]
    if not found:
        raise ConfigError(
            f"bytes_per_token={limit} is less than the smallest row of "
            f"{candidates[0].plan.groups} groups, {candidates[0].row_bytes:g} bytes; use more "
            "groups or another --kv-format"
        )
    return found


def choose(candidates: Sequence[Candidate], budget: Budget) -> Candidate:
    """One core for all layers: the least that meets ``max_kl``, else the most that fits the bytes.

    Args:
        candidates: smallest core first; measured, where ``max_kl`` is given.
        budget: at least one limit.

    Raises:
        ConfigError: no candidate is within the budget.
    """
    affordable = within_bytes(candidates, budget)
    groups = candidates[0].plan.groups
    if budget.max_kl is None:
        return affordable[-1]
    for candidate in affordable:
        if candidate.kl <= budget.max_kl:
            return candidate
    least = min(affordable, key=lambda candidate: candidate.kl)
    raise ConfigError(
        f"max_kl={budget.max_kl:g} is out of reach: {groups} groups lose at least {least.kl:.6f} "
        f"(core_dims={least.plan.core}, {least.row_bytes:g} bytes); use fewer groups, more "
        "bytes, more calibration text, or a larger --max-kl"
    )


def survey(
    source: Path,
    options: ConversionOptions,
    budget: Budget,
    progress: Progress = lambda *_: None,
    measured: bool = False,
) -> list[Candidate]:
    """The candidates for a budget; measured if it limits the KL, or if asked to.

    Raises:
        CheckpointError: not a model with latent attention.
        ConfigError: no candidates, or text that is absent or too short.
    """
    candidates = list_candidates(source, options.groups, budget)
    if measured or budget.max_kl is not None:
        return measure_candidates(source, options, candidates, budget.kv_format, progress)
    return candidates


@torch.no_grad()
def measure_candidates(
    source: Path,
    options: ConversionOptions,
    candidates: Sequence[Candidate],
    kv_format: KVFormat,
    progress: Progress = lambda *_: None,
) -> list[Candidate]:
    """The candidates with what each loses on held-out calibration text.

    Args:
        source: the checkpoint that would be converted.
        options: how; their groups and core_dims are the candidates'.
        candidates: from :func:`list_candidates`.
        kv_format: format of the cached rows.
        progress: called with stage, parts done, parts in all.

    Raises:
        ConfigError: text that is absent or too short to hold some out.
    """
    checkpoint = Checkpoint(source)
    prefill = sequence_context(checkpoint.config, options.context) // 2
    fitted, held_out = _split(calibration_sequences(checkpoint, options), prefill)
    model = LayeredModel(checkpoint, torch.device(options.device), options.compute_dtype)
    texts = 2 + len(candidates)
    calibration, exact = (
        model.embed(each, options.state_memory // texts) for each in (fitted, held_out)
    )
    trials = [
        _Trial(
            _recipe(checkpoint, options, candidate.plan),
            DecodeSpec(Mode.TPLA, candidate.plan, kv_format, prefill),
            exact.copy(),
        )
        for candidate in candidates
    ]
    for index in range(model.layers):
        progress("layers", index, model.layers)
        layer: Any = model.layer(index)
        rotate_layer(model, layer, index, calibration, trials[0].recipe)
        for trial in trials:
            trial.advance(model, layer, index, calibration, exact)
        advance(model, layer, calibration)
        advance(model, layer, exact)
        # Freed before the next layer, or the head, is read: a reference would double the peak.
        del layer
    progress("layers", model.layers, model.layers)
    measures = _measures(model, held_out, trials, exact)
    return [replace(c, measure=measure) for c, measure in zip(candidates, measures, strict=True)]


@dataclass
class _Trial:
    """One candidate's decode of the held-out text, as far as the layers have come."""

    recipe: Recipe
    spec: DecodeSpec
    hidden: HiddenStates
    layer_errors: list[float] = field(default_factory=list)

    def advance(
        self,
        model: LayeredModel,
        layer: Any,
        index: int,
        calibration: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
    ) -> None:
        """Fit decode of a rotated layer, note its error, replace the hidden states."""
        decode = fit_decode(model, layer, index, calibration, self.recipe)
        decode.install(layer, self.spec, prefilled=False)
        self.layer_errors.append(attention_error(model, layer, exact))
        advance_decoded(model, layer, self.hidden, exact, self.spec)
        uninstall(layer)


def _measures(
    model: LayeredModel,
    held_out: Sequence[torch.Tensor],
    trials: Sequence[_Trial],
    exact: Sequence[torch.Tensor],
) -> list[PlanMeasure]:
    first = trials[0].spec
    unsliced = ModelPlan(first.plan.kv_lora_rank, 1, (0,) * model.layers)
    whole = DecodeSpec(Mode.MLA, unsliced, KVFormat.FP32, first.first_scored)
    specs, states = [trial.spec for trial in trials], [trial.hidden for trial in trials]
    base, *scores = score_states(model, held_out, [whole, *specs], exact, [None, *states])
    return [
        PlanMeasure(
            kl=score.kl / score.tokens,
            ppl_ratio=exp((score.nll - base.nll) / base.tokens),
            top1=score.agreed / score.tokens,
            layer_errors=trial.layer_errors,
        )
        for score, trial in zip(scores, trials, strict=True)
    ]


def _recipe(checkpoint: Checkpoint, options: ConversionOptions, plan: ModelPlan) -> Recipe:
    options = replace(options, groups=plan.groups, core_dims=plan.core_dims)
    if options.method is Method.LEARNED:
        keyed = options.alignment is Alignment.KEYS_AND_VALUES
        alignment = Alignment.VALUES if keyed else options.alignment
        options = replace(options, method=Method.PCA, alignment=alignment)
    return make_recipe(checkpoint, options)


def _split(
    sequences: list[torch.Tensor], prefill: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences to fit on, and those held out that are long enough to score."""
    kept, judged = hold_out(sequences)
    held_out = [sequences[number] for number in judged if len(sequences[number]) > prefill + 1]
    if not held_out:
        raise ConfigError(
            f"no held-out calibration sequence has more than {prefill} tokens, the half of a "
            "context that is prefilled; give more --max-tokens or text, or a smaller --context"
        )
    return [sequences[number] for number in kept], held_out
