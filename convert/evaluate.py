"""Perplexity and divergence of decode approximations from the exact model.

The exact model and every way to decode run side by side, one layer in memory at a time; each keeps
the hidden states of all sequences, beyond a limit in a file. Scored are the tokens after
``scored_from``, that is, the predictions of the queries that the approximation applies to.

Shape suffixes: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tpla.convert.calibrate import advance
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.hidden_states import MEMORY_BYTES, HiddenStates
from tpla.convert.layers import LayeredModel, run_layer
from tpla.convert.sliced_attention import DecodeSpec, Mode, Sliced, install, uninstall
from tpla.convert.text import load_tokenizer, read_sequences, sequence_context
from tpla.core.checkpoint import (
    KEYS_TENSOR,
    MANIFEST_NAME,
    UNALIGNED,
    VALUES_TENSOR,
    Manifest,
    fingerprint,
    values_path,
)
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan, PVFormat

ROWS_AT_ONCE = 256
"""Positions whose logits over the whole vocabulary are in memory together."""

UNCONVERTED = "none"
"""The ``method`` of a checkpoint without tpla.json."""


@dataclass(frozen=True)
class EvalRow:
    """One measurement.

    Attributes:
        mode: mla, gla or tpla.
        groups: latent groups.
        core_dims: shared core dims, one number for all layers or one for each.
        method: rotation of the checkpoint.
        kv_format: cache format.
        context: tokens of a sequence.
        prefill: positions below it are exact.
        tokens: tokens scored.
        ppl: perplexity.
        kl: mean KL(exact || this), nats.
        top1: share of positions where the most likely token is the exact model's.
        scored_from: predictions of positions from here on are scored.
        alignment: which decode weights were fitted, and used.
        sliced: what each group computes from its slice alone; see ``Sliced``.
        pv_format: how FP8 rows are added up; files older than it have rows of fp16.
    """

    mode: str
    groups: int
    core_dims: int | list[int]
    method: str
    kv_format: str
    context: int
    prefill: int
    tokens: int
    ppl: float
    kl: float
    top1: float
    scored_from: int
    alignment: str
    sliced: str
    pv_format: str = PVFormat.FP16.value

    @property
    def name(self) -> str:
        """Mode and what departs from what is served."""
        fields = [self.mode]
        if self.sliced != Sliced.SOFTMAX.value:
            fields.append(self.sliced)
        elif self.mode == Mode.TPLA.value and self.alignment == UNALIGNED:
            fields.append("-align")
        if self.pv_format != PVFormat.FP16.value:
            fields.append(f"pv-{self.pv_format}")
        return " ".join(fields)


class Subject:
    """The checkpoint under evaluation.

    Args:
        directory: a converted checkpoint, or a plain one for mode mla.
        device: where to compute.
        dtype: in which dtype.

    Raises:
        CheckpointError: unreadable, or tpla.json does not belong to the weights.
    """

    def __init__(
        self, directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.checkpoint = Checkpoint(directory)
        self.model = LayeredModel(self.checkpoint, torch.device(device), dtype)
        self.manifest: Manifest | None = None
        if (directory / MANIFEST_NAME).exists():
            self.manifest = Manifest.load(directory)
            if self.manifest.fingerprint != fingerprint(directory):
                raise CheckpointError(
                    f"{directory}/{MANIFEST_NAME} was written for other weights; convert again"
                )
            self.manifest.check_values(directory)

    def spec(
        self,
        mode: Mode,
        kv_format: KVFormat,
        prefill: int,
        scored_from: int | None = None,
        sliced: Sliced = Sliced.SOFTMAX,
        aligned: bool = True,
        pv_format: PVFormat = PVFormat.FP16,
    ) -> DecodeSpec:
        """The decoding that the checkpoint's manifest describes, or plain MLA.

        Raises:
            CheckpointError: GLA or TPLA of a checkpoint that was not converted.
        """
        if mode is Mode.MLA:
            whole = ModelPlan(int(self.model.config.kv_lora_rank), 1, (0,) * self.model.layers)
            return DecodeSpec(mode, whole, kv_format, prefill, scored_from, pv_format=pv_format)
        manifest = self._manifest()
        aligned = aligned and mode is Mode.TPLA and manifest.aligned
        return DecodeSpec(
            mode, manifest.plan, kv_format, prefill, scored_from, aligned, sliced, pv_format
        )

    def scales(self, layer: int) -> list[list[float]] | None:
        """Logit scales of ``layer``, None for a checkpoint that was not converted."""
        return None if self.manifest is None else self.manifest.logit_scales[layer]

    def fitted(self, layer: int) -> dict[str, torch.Tensor]:
        """Projections of ``layer`` that were fitted for decode, by name; see ``values_path``."""
        if self.manifest is None or not self.manifest.aligned:
            return {}
        return load_file(values_path(self.checkpoint.directory, layer))

    def spectrum(self, layer: int) -> list[float] | None:
        """Shares of energy of ``layer``'s dims, None for a checkpoint that was not converted."""
        return None if self.manifest is None else self.manifest.spectrum[layer]

    def install(self, layer: nn.Module, index: int, spec: DecodeSpec) -> None:
        """Make layer ``index`` decode by ``spec`` behind an exact prefill, which it leaves out."""
        fitted = self.fitted(index) if _uses_fitted(spec) else {}
        install(
            layer,
            spec,
            self.scales(index),
            fitted.get(VALUES_TENSOR),
            self.spectrum(index),
            prefilled=False,
            keys_GHNW=fitted.get(KEYS_TENSOR),
        )

    @property
    def alignment(self) -> str:
        """Which decode weights of the checkpoint were fitted."""
        return UNALIGNED if self.manifest is None else self.manifest.alignment

    @property
    def method(self) -> str:
        """Rotation of the checkpoint."""
        return UNCONVERTED if self.manifest is None else self.manifest.method

    def sequences(
        self,
        text: Path,
        context: int,
        max_tokens: int,
        per_document: bool,
        trust_remote_code: bool = False,
    ) -> list[torch.Tensor]:
        """Token ids ``[T]`` of each sequence of a text, see :func:`read_sequences`.

        Raises:
            ConfigError: the text cannot be read, or the model has fewer positions than ``context``.
        """
        tokenizer = load_tokenizer(self.checkpoint.directory, trust_remote_code)
        context = sequence_context(self.checkpoint.config, context)
        return read_sequences(text, tokenizer, context, max_tokens, per_document)

    def _manifest(self) -> Manifest:
        if self.manifest is None:
            return Manifest.load(self.checkpoint.directory)
        return self.manifest


@torch.no_grad()
def evaluate_specs(
    subject: Subject,
    sequences: Sequence[torch.Tensor],
    specs: Sequence[DecodeSpec],
    context: int,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[EvalRow]:
    """Measure each way to decode on the same text, one row each, in order.

    Args:
        subject: the checkpoint.
        sequences: token ids ``[T]`` each.
        specs: ways to decode.
        context: for the record; sequences were cut to it.
        progress: called with stage, parts done, parts in all.

    Raises:
        ConfigError: no sequence is longer than what a spec does not score.
    """
    for spec in specs:
        check_scorable(sequences, spec)
    exact, others = _hidden_states(subject, sequences, specs, progress)
    scores = score_states(subject.model, sequences, specs, exact, others)
    return [
        _row(subject.method, subject.alignment, spec, score, context)
        for spec, score in zip(specs, scores, strict=True)
    ]


def check_scorable(sequences: Sequence[torch.Tensor], spec: DecodeSpec) -> None:
    """Refuse a text that ``spec`` leaves nothing to score of.

    Raises:
        ConfigError: no sequence is longer than what the spec does not score.
    """
    if not any(ids.shape[0] > spec.first_scored + 1 for ids in sequences):
        raise ConfigError(
            f"prefill={spec.prefill}, scored from {spec.first_scored}, leaves nothing to "
            f"score: the longest sequence has {max(ids.shape[0] for ids in sequences)} tokens; "
            "lower --prefill or --score-from, or give more text"
        )


def table_specs(subject: Subject, context: int) -> list[DecodeSpec]:
    """Rows of ``tpla eval table``: every mode, all decode and PD-separated, fp32 and fp8.

    TPLA comes without its alignment, too, and, where there is no shared core, with a sliced norm;
    the two modes of FP8 rows that are served, MLA's being ``snapmla``, with P V in FP8, too. All
    score the second half of the context, so that their figures compare.
    """
    scored_from = context // 2
    variants: list[tuple[Mode, Sliced, bool]] = [(mode, Sliced.SOFTMAX, True) for mode in Mode]
    if subject.manifest is not None and subject.manifest.aligned:
        variants.append((Mode.TPLA, Sliced.SOFTMAX, False))
    if subject.manifest is not None and not any(subject.manifest.plan.core_dims):
        variants += [(Mode.TPLA, sliced, False) for sliced in (Sliced.NORM, Sliced.BOTH)]
    specs = [
        subject.spec(mode, kv_format, prefill, scored_from, sliced, aligned)
        for mode, sliced, aligned in variants
        for prefill in (0, scored_from)
        for kv_format in (KVFormat.FP32, KVFormat.FP8)
        if sliced is Sliced.SOFTMAX or kv_format is KVFormat.FP32
    ]
    return specs + [
        subject.spec(mode, KVFormat.FP8, prefill, scored_from, pv_format=PVFormat.FP8)
        for mode in (Mode.MLA, Mode.TPLA)
        for prefill in (0, scored_from)
    ]


class Score:
    """Sums over the scored positions of one way to decode.

    Attributes:
        tokens: positions.
        nll: of the tokens that followed, nats.
        kl: KL(exact || this), nats.
        agreed: positions where the most likely token is the exact model's.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.nll = self.kl = self.agreed = 0.0

    def add(
        self, exact_TV: torch.Tensor, approximate_TV: torch.Tensor, targets_T: torch.Tensor
    ) -> None:
        """Add positions given their log-probabilities and the tokens that followed."""
        self.tokens += targets_T.shape[0]
        self.nll -= float(approximate_TV.gather(1, targets_T[:, None]).double().sum())
        kl_T, agreed_T = divergence(exact_TV, approximate_TV)
        self.kl += float(kl_T.sum())
        self.agreed += float(agreed_T.sum())


def divergence(
    exact_TV: torch.Tensor, approximate_TV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each position, from log-probabilities: KL(exact || this) in float64 nats, and whether both
    find the same token most likely."""
    kl_T = (exact_TV.exp() * (exact_TV - approximate_TV)).sum(-1, dtype=torch.float64)
    return kl_T, exact_TV.argmax(-1) == approximate_TV.argmax(-1)


def score_states(
    model: LayeredModel,
    sequences: Sequence[torch.Tensor],
    specs: Sequence[DecodeSpec],
    exact: Sequence[torch.Tensor],
    others: Sequence[Sequence[torch.Tensor] | None],
) -> list[Score]:
    """Score last hidden states ``[T, E]`` of each sequence: the exact model's and each spec's.

    None among ``others`` stands for the exact model's own.
    """
    scores = [Score() for _ in specs]
    head = model.head()
    for number, ids_T in enumerate(sequences):
        exact_TE = exact[number]
        states = [exact_TE if other is None else other[number] for other in others]
        _score_sequence(head, ids_T, exact_TE, specs, states, scores)
    return scores


def _hidden_states(
    subject: Subject,
    sequences: Sequence[torch.Tensor],
    specs: Sequence[DecodeSpec],
    progress: Callable[[str, int, int], None],
) -> tuple[HiddenStates, list[HiddenStates | None]]:
    """Last hidden states ``[T, E]`` of the exact model, and of each spec (None: the same)."""
    model = subject.model
    exact = model.embed(sequences, MEMORY_BYTES // (1 + len(specs)))
    others = [None if spec.is_exact else exact.copy() for spec in specs]
    for index in range(model.layers):
        progress("layers", index, model.layers)
        layer: Any = model.layer(index)
        for spec, hidden in zip(specs, others, strict=True):
            if hidden is not None:
                subject.install(layer, index, spec)
                advance_decoded(model, layer, hidden, exact, spec)
                uninstall(layer)
        advance(model, layer, exact)
        del layer
    progress("layers", model.layers, model.layers)
    return exact, others


def advance_decoded(
    model: LayeredModel,
    layer: nn.Module,
    hidden: HiddenStates,
    exact: Sequence[torch.Tensor],
    spec: DecodeSpec,
) -> None:
    """Replace hidden states by the output of a layer that decodes, where a position is scored.

    Args:
        model: whose layer it is.
        layer: with ``install(..., prefilled=False)`` done.
        hidden: inputs of the layer; rows of positions below ``spec.prefill`` mean nothing.
        exact: inputs of the layer in the exact model, which those rows are taken from.
        spec: how the layer decodes.
    """
    for position, own_TE in enumerate(hidden):
        if own_TE.shape[0] > spec.first_scored + 1:
            hidden[position] = decode_layer(model, layer, own_TE, exact[position], spec.prefill)


def decode_layer(
    model: LayeredModel,
    layer: nn.Module,
    own_TE: torch.Tensor,
    exact_TE: torch.Tensor,
    prefill: int,
) -> torch.Tensor:
    """What :func:`advance_decoded` does to one sequence."""
    joined_TE = torch.cat([exact_TE[:prefill], own_TE[prefill:]])
    return run_layer(layer, joined_TE, model.rotary(joined_TE.shape[0]))


def _score_sequence(
    head: nn.Module,
    ids_T: torch.Tensor,
    exact_TE: torch.Tensor,
    specs: Sequence[DecodeSpec],
    states: Sequence[torch.Tensor],
    scores: Sequence[Score],
) -> None:
    last = ids_T.shape[0] - 1
    targets_T = ids_T[1:].to(exact_TE.device)
    for start in range(min(spec.first_scored for spec in specs), last, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, last)
        exact_TV = head(exact_TE[start:stop]).float().log_softmax(-1)
        for spec, state_TE, score in zip(specs, states, scores, strict=True):
            first = max(start, spec.first_scored)
            if first >= stop:
                continue
            own_TV = exact_TV[first - start :]
            if state_TE is not exact_TE:
                own_TV = head(state_TE[first:stop]).float().log_softmax(-1)
            score.add(exact_TV[first - start :], own_TV, targets_T[first:stop])


def _uses_fitted(spec: DecodeSpec) -> bool:
    return spec.mode is Mode.TPLA and spec.aligned


def _row(method: str, alignment: str, spec: DecodeSpec, score: Score, context: int) -> EvalRow:
    return EvalRow(
        mode=spec.mode.value,
        groups=spec.plan.groups,
        core_dims=spec.plan.core,
        method=method,
        kv_format=spec.kv_format.value,
        context=context,
        prefill=spec.prefill,
        tokens=score.tokens,
        ppl=exp(score.nll / score.tokens),
        kl=score.kl / score.tokens,
        top1=score.agreed / score.tokens,
        scored_from=spec.first_scored,
        alignment=alignment if _uses_fitted(spec) else UNALIGNED,
        sliced=spec.sliced.value,
        pv_format=spec.pv_format.value,
    )
