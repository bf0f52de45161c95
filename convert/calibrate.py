"""Layer by layer: measure the latent, choose its basis and logit scales.

The calibration text's hidden states are the only thing carried from layer to layer, beyond a limit
in a file (:mod:`~tpla.convert.hidden_states`). Through each
layer the text passes up to five times: its latent projection alone for the second moment; its
attention, if the basis goes by it; then, in the rotated basis, attention for the logit scales, and
again, with those, for the value alignment; at last the whole layer for the next hidden states.

Shape suffixes: T tokens, E hidden size, R latent dims, H heads, N nope dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tpla.convert.alignment import Alignment, ValueStatistics, sliced_keys, sliced_values
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.hidden_states import MEMORY_BYTES, Chosen, HiddenStates
from tpla.convert.layers import LayeredModel, run_layer
from tpla.convert.learned_rotation import LayerWeights, Learned, learn_slicing
from tpla.convert.logit_scale import (
    LogitScale,
    LogitStatistics,
    energy_from_weights,
    weight_covariance,
)
from tpla.convert.rewrite import LatentProjections, read_projections
from tpla.convert.rotation import Method, make_rotation, spectrum
from tpla.convert.second_moments import AttentionMoments, LatentMoments, Readers
from tpla.convert.sliced_attention import (
    CoreValues,
    DecodeSpec,
    Mode,
    Projected,
    attention_error,
    install,
    project,
    uninstall,
    up_projections,
)
from tpla.convert.text import hold_out
from tpla.core.errors import CheckpointError
from tpla.core.latent_layout import KVFormat, ModelPlan, ShardPlan

LEARNING_STEPS = 400

NEGLIGIBLE_ERROR = 1e-4
"""Share of its output's energy that a layer may lose without a search for a better basis."""


@dataclass(frozen=True)
class Recipe:
    """What to find for every layer.

    Attributes:
        plan: how decode divides the latent of each layer.
        method: which basis.
        logit_scale: which logit scales.
        seed: of random choices; layer i uses ``seed + i``.
        alignment: which decode weights are fitted.
        learning_steps: of a learned basis.
        core_values: how groups share the core's values where the fit of values begins.
    """

    plan: ModelPlan
    method: Method
    logit_scale: LogitScale
    seed: int = 0
    alignment: Alignment = Alignment.NONE
    learning_steps: int = LEARNING_STEPS
    core_values: CoreValues = CoreValues.COUNTED

    @property
    def needs_text(self) -> bool:
        """Whether the recipe cannot do without calibration text."""
        fits = self.logit_scale is LogitScale.FIT and self.plan.groups > 1
        return self.method.is_measured or fits or self.alignment is not Alignment.NONE


@dataclass(frozen=True)
class DecodeWeights:
    """What decode computes a layer with, beside its weights in the new basis.

    Attributes:
        scales_HG: logit scales; fitted keys have their own.
        values_GHWV: fitted value projections, float64; None where none are.
        keys_GHNW: fitted key projections; None where none are.
    """

    scales_HG: torch.Tensor
    values_GHWV: torch.Tensor | None = None
    keys_GHNW: torch.Tensor | None = None

    def install(self, layer: nn.Module, spec: DecodeSpec, prefilled: bool = True) -> None:
        """Make ``layer`` decode with these weights, see :func:`sliced_attention.install`."""
        scales = self.scales_HG.tolist()
        values_GHWV, keys_GHNW = self.values_GHWV, self.keys_GHNW
        install(layer, spec, scales, values_GHWV, prefilled=prefilled, keys_GHNW=keys_GHNW)


@dataclass(frozen=True)
class LayerResult:
    """What was found for one layer.

    Attributes:
        layer: its index.
        rotated: its latent projections in the new basis.
        spectrum: share of the latent's energy along each rotated dim.
        decode: logit scales and fitted projections.
    """

    layer: int
    rotated: LatentProjections
    spectrum: list[float]
    decode: DecodeWeights


@torch.no_grad()
def calibrate_on_text(
    model: LayeredModel,
    sequences: Sequence[torch.Tensor],
    recipe: Recipe,
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[LayerResult]:
    """Results of all layers in order, with one layer in memory.

    Args:
        model: the source model.
        sequences: token ids ``[T]`` each.
        recipe: what to find.
        memory_bytes: of the text's hidden states in memory.
    """
    hidden = model.embed(sequences, memory_bytes)
    for index in range(model.layers):
        layer: Any = model.layer(index)
        rotated, energies, keys_GHNW = rotate_layer(model, layer, index, hidden, recipe)
        decode = fit_decode(model, layer, index, hidden, recipe, keys_GHNW)
        advance(model, layer, hidden)
        yield LayerResult(index, rotated, energies, decode)
        # Freed before the next layer is read: a reference kept here would double the peak.
        del layer, rotated, keys_GHNW, decode


def rotate_layer(
    model: LayeredModel, layer: Any, index: int, hidden: Sequence[torch.Tensor], recipe: Recipe
) -> tuple[LatentProjections, list[float], torch.Tensor | None]:
    """Turn a layer's latent into the recipe's basis, in place; the plan matters if it is learned.

    Returns:
        Its latent projections in the new basis, the share of energy along each dim, and decode's
        keys ``[G, H, N, W]`` where they were learned with the basis.
    """
    moments, rank = latent_moments(layer, hidden), recipe.plan.kv_lora_rank
    covariance_RR = moments.second()
    moment_RR = basis_moment(model, layer, hidden, recipe.method, moments)
    rotation_RR = make_rotation(recipe.method, rank, moment_RR, recipe.seed + index)
    source = read_projections(model.checkpoint, index)
    rotated = _set_basis(layer, source, rotation_RR)
    keys_GHNW = None
    if recipe.method is Method.LEARNED and recipe.plan.groups > 1:
        rotation_RR, keys_GHNW = _learned(model, layer, index, source, rotation_RR, hidden, recipe)
        rotated = _set_basis(layer, source, rotation_RR)
    return rotated, spectrum(covariance_RR, rotation_RR), keys_GHNW


def fit_decode(
    model: LayeredModel,
    layer: Any,
    index: int,
    hidden: Sequence[torch.Tensor],
    recipe: Recipe,
    keys_GHNW: torch.Tensor | None = None,
) -> DecodeWeights:
    """Logit scales, and values that fit them or learned keys, of a rotated layer."""
    plan = recipe.plan.layer(index)
    scales_HG = _measured_scales(model, layer, hidden, recipe.logit_scale, plan)
    if plan.groups == 1 or recipe.alignment is Alignment.NONE:
        return DecodeWeights(scales_HG)
    read_with_GHNW = keys_GHNW
    if read_with_GHNW is None:
        read_with_GHNW = sliced_keys(up_projections(layer.self_attn)[0], plan, scales_HG)
    values_GHWV = _aligned_values(model, layer, hidden, plan, read_with_GHNW, recipe.core_values)
    if recipe.alignment is Alignment.VALUES:
        return DecodeWeights(scales_HG, values_GHWV)
    return DecodeWeights(scales_HG, values_GHWV, read_with_GHNW)


@torch.no_grad()
def calibrate_without_text(
    checkpoint: Checkpoint, layers: int, heads: int, recipe: Recipe
) -> Iterator[LayerResult]:
    """Results of all layers in order, from the weights alone.

    The spectrum and the energies rest on :func:`tpla.convert.logit_scale.weight_covariance`.
    """
    assert not recipe.needs_text
    rank = recipe.plan.kv_lora_rank
    for index in range(layers):
        source = read_projections(checkpoint, index)
        bias_R = None if source.bias_A is None else source.bias_A[:rank]
        norm_E = checkpoint.load(f"model.layers.{index}.input_layernorm.weight")
        covariance_RR = weight_covariance(source.kv_a_AE[:rank], bias_R, norm_E)
        rotation_RR = make_rotation(recipe.method, rank, None, recipe.seed + index)
        rotated = source.rotate(rotation_RR)
        scales_HG = torch.ones(heads, recipe.plan.groups)
        if recipe.logit_scale is LogitScale.ENERGY:
            scales_HG = energy_from_weights(
                _key_projection(rotated, heads, checkpoint.config["qk_nope_head_dim"]),
                rotation_RR.T @ covariance_RR @ rotation_RR,
                recipe.plan.layer(index),
            )
        decode = DecodeWeights(scales_HG)
        yield LayerResult(index, rotated, spectrum(covariance_RR, rotation_RR), decode)


def latent_moments(layer: Any, hidden: Sequence[torch.Tensor]) -> LatentMoments:
    """Sums over the latents of the text.

    Raises:
        CheckpointError: the latent is not finite.
    """
    moments = LatentMoments(layer.self_attn.kv_lora_rank)
    for hidden_TE in hidden:
        moments.update(_normalised_latent(layer, hidden_TE))
    if not torch.isfinite(moments.second()).all():
        raise CheckpointError(
            "the latent of the calibration text is not finite; try --compute-dtype float32, "
            "and check that weights and config.json belong together"
        )
    return moments


def basis_moment(
    model: LayeredModel,
    layer: Any,
    hidden: Sequence[torch.Tensor],
    method: Method,
    moments: LatentMoments,
) -> torch.Tensor:
    """The second moment ``[R, R]`` that a measured basis is chosen by."""
    if method is Method.CENTERED:
        return moments.centered()
    if method not in (Method.ATTENDED, Method.QUERIES):
        return moments.second()
    read = AttentionMoments(Readers.of(layer.self_attn))
    for hidden_TE, seen in zip(hidden, _seen(model, layer, hidden), strict=True):
        read.update(_normalised_latent(layer, hidden_TE), seen)
    return read.attended() if method is Method.ATTENDED else read.queries()


def advance(model: LayeredModel, layer: nn.Module, hidden: HiddenStates) -> None:
    """Replace each hidden state by the layer's output."""
    for position, hidden_TE in enumerate(hidden):
        hidden[position] = run_layer(layer, hidden_TE, model.rotary(hidden_TE.shape[0]))


def _normalised_latent(layer: Any, hidden_TE: torch.Tensor) -> torch.Tensor:
    """The latent after RMSNorm without its weight, ``[T, R]`` float32."""
    attention = layer.self_attn
    rank, eps = attention.kv_lora_rank, attention.kv_a_layernorm.variance_epsilon
    raw_TR = attention.kv_a_proj_with_mqa(layer.input_layernorm(hidden_TE))[:, :rank]
    return F.rms_norm(raw_TR.float(), (rank,), eps=eps)


def _seen(model: LayeredModel, layer: Any, hidden: Sequence[torch.Tensor]) -> Iterator[Projected]:
    """What the layer's attention reads of each sequence."""
    for hidden_TE in hidden:
        rotary = model.rotary(hidden_TE.shape[0])
        yield project(layer.self_attn, layer.input_layernorm(hidden_TE), rotary)


def _set_basis(
    layer: Any, source: LatentProjections, rotation_RR: torch.Tensor
) -> LatentProjections:
    rotated = source.rotate(rotation_RR)
    for name, tensor in rotated.named().items():
        layer.self_attn.get_parameter(name).copy_(tensor)
    return rotated


def _learned(
    model: LayeredModel,
    layer: Any,
    index: int,
    source: LatentProjections,
    principal_RR: torch.Tensor,
    hidden: Sequence[torch.Tensor],
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The learned basis and keys, or the principal one where that loses less on text held out."""
    learnt_on, held_out = (Chosen(hidden, part) for part in hold_out(hidden))

    def error(keys_GHNW: torch.Tensor | None) -> float:
        """On held-out text, in the layer's present basis."""
        decode = fit_decode(model, layer, index, learnt_on, recipe, keys_GHNW)
        decode.install(layer, DecodeSpec(Mode.TPLA, recipe.plan, KVFormat.FP32))
        lost = attention_error(model, layer, held_out)
        uninstall(layer)
        return lost

    principal_error = error(None)
    if principal_error <= NEGLIGIBLE_ERROR:
        return principal_RR, None
    learned = _learn(model, layer, index, learnt_on, recipe)
    keys_GHNW = learned.keys_GHNW if recipe.alignment is Alignment.KEYS_AND_VALUES else None
    learned_RR = principal_RR @ learned.turn_RR
    _set_basis(layer, source, learned_RR)
    better = error(keys_GHNW) < principal_error
    return (learned_RR, keys_GHNW) if better else (principal_RR, None)


def _learn(
    model: LayeredModel, layer: Any, index: int, hidden: Sequence[torch.Tensor], recipe: Recipe
) -> Learned:
    """What is learned of a layer in its principal basis."""
    attention = layer.self_attn
    w_uk_HNR, w_uv_HVR = up_projections(attention)
    o_proj_EB = attention.o_proj.weight.detach()
    weights = LayerWeights(w_uk_HNR.float(), w_uv_HVR.float(), o_proj_EB.float(), attention.scaling)

    def read(number: int) -> Projected:
        (seen,) = _seen(model, layer, hidden[number : number + 1])
        return seen

    plan, with_keys = recipe.plan.layer(index), recipe.alignment is Alignment.KEYS_AND_VALUES
    steps, seed = recipe.learning_steps, recipe.seed + index
    return learn_slicing(weights, plan, len(hidden), read, steps, seed, with_keys)


def _measured_scales(
    model: LayeredModel,
    layer: Any,
    hidden: Sequence[torch.Tensor],
    logit_scale: LogitScale,
    plan: ShardPlan,
) -> torch.Tensor:
    """Logit scales ``[H, G]`` of the rotated layer."""
    attention = layer.self_attn
    if plan.groups == 1 or logit_scale is LogitScale.ONE:
        return torch.ones(attention.num_heads, plan.groups)
    statistics = LogitStatistics(attention.num_heads, plan, model.device)
    w_uk_HNR, _ = up_projections(attention)
    for seen in _seen(model, layer, hidden):
        statistics.update(seen, w_uk_HNR, attention.scaling)
    return statistics.fit() if logit_scale is LogitScale.FIT else statistics.energy()


def _aligned_values(
    model: LayeredModel,
    layer: Any,
    hidden: Sequence[torch.Tensor],
    plan: ShardPlan,
    keys_GHNW: torch.Tensor,
    core_values: CoreValues,
) -> torch.Tensor:
    """Value projections of decode ``[G, H, W, V]``, fitted to what the keys read."""
    attention = layer.self_attn
    w_uk_HNR, w_uv_HVR = up_projections(attention)
    heads, value_dims, _ = w_uv_HVR.shape
    statistics = ValueStatistics(heads, value_dims, plan, model.device)
    for seen in _seen(model, layer, hidden):
        statistics.update(seen, w_uk_HNR, w_uv_HVR, keys_GHNW, attention.scaling)
    fitted_HDV = statistics.solve(sliced_values(w_uv_HVR, plan, core_values))
    return fitted_HDV.unflatten(1, (plan.groups, plan.latent_width)).transpose(0, 1).contiguous()


def _key_projection(projections: LatentProjections, heads: int, nope: int) -> torch.Tensor:
    """W_UK ``[H, N, R]`` of W_UKV."""
    return projections.kv_b_BR.view(heads, -1, projections.gamma_R.shape[0])[:, :nope]
