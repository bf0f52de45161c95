"""What a decode rank computes: attention over slices of the cached latent.

Queries below ``prefill`` see the exact latents (prefill runs unsliced MLA). Queries from there on
read rows as decode ranks store them: cut into groups and packed in the cache's format, the rows of
prompt tokens included. With the latent's W_UK absorbed into the query, q~ = q_nope W_UK,

    TPLA, group j:  softmax(scale * (q~_core c_core + mu_j q~_j c_j + q_pe k_pe)) [c_core, c_j] W_UV
    GLA,  group j:  the same with mu = 1, for the j-th part of the heads only
    MLA:            one group

To tell apart what slicing costs, evaluation can slice the latent's RMSNorm too, which decode never
does (it normalises before it cuts), and can leave the softmax whole, see :class:`Sliced`.

TPLA sums over groups; the values of the shared core count in group 0 alone, else they would be
counted ``groups`` times (averaged they would be right, too: :class:`CoreValues`). GLA (grouped
latent attention) gives a head one slice and no sum, its row as wide as TPLA's.

Shape suffixes: T tokens, Q queries, K keys, H heads, N nope dims, D RoPE dims, V value dims,
R latent dims, W latent dims of one rank, E hidden size.
Source: TPLA, equations 10-25; SnapMLA for the FP8 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tpla.convert.layers import LayeredModel
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import (
    CORE_VALUE_GROUP,
    KVFormat,
    LatentLayout,
    ModelPlan,
    PVFormat,
    ShardPlan,
    describe_core,
)
from tpla.kernels.ref.blockwise_attention import blockwise_attention
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows

_LOGITS_AT_ONCE = 2**24


class Mode(str, Enum):
    """What decode computes."""

    MLA = "mla"
    GLA = "gla"
    TPLA = "tpla"


class Sliced(str, Enum):
    """What each group computes from its slice alone; ``softmax`` is what decode serves.

    A sliced norm divides each slice of a token's latent by the slice's own root mean square and
    multiplies it by that of the calibration text, the constant that the paper calibrates.
    """

    SOFTMAX = "softmax"
    NORM = "norm"
    BOTH = "both"


class CoreValues(str, Enum):
    """How groups share the values of the core dims, which every group reads; ``counted``, in
    :data:`CORE_VALUE_GROUP` alone, is what decode serves."""

    COUNTED = "counted"
    AVERAGED = "averaged"

    def share(self, groups: int, group: int) -> float:
        """How much of the core's values ``group`` adds to the sum over ``groups``."""
        if self is CoreValues.AVERAGED:
            return 1 / groups
        return float(group == CORE_VALUE_GROUP)


@dataclass(frozen=True)
class DecodeSpec:
    """One way to decode.

    Attributes:
        mode: which attention.
        plan: division of every layer's latent; one group for MLA.
        kv_format: how rows are stored.
        prefill: positions below this are prefilled exactly.
        scored_from: an evaluation scores positions from here on; None: from ``prefill``.
        aligned: whether TPLA uses fitted value projections where the checkpoint has them.
        sliced: what is sliced; anything but the softmax is for TPLA in fp32 without a shared core.
        pv_format: how FP8 rows are added up; fp16, which loses next to nothing, is not emulated.
        core_values: how TPLA's groups share the core's values, where projections are not fitted.

    Raises:
        ConfigError: MLA with groups, a negative prefill, exact positions that are scored, a sliced
            norm where there is none, or P V in FP8 over other rows.
    """

    mode: Mode
    plan: ModelPlan
    kv_format: KVFormat
    prefill: int = 0
    scored_from: int | None = None
    aligned: bool = True
    sliced: Sliced = Sliced.SOFTMAX
    pv_format: PVFormat = PVFormat.FP16
    core_values: CoreValues = CoreValues.COUNTED

    def __post_init__(self) -> None:
        if self.sliced is not Sliced.SOFTMAX and (
            self.mode is not Mode.TPLA
            or self.kv_format is not KVFormat.FP32
            or any(self.plan.core_dims)
            or self.aligned
        ):
            core_dims = describe_core(self.plan.core_dims)
            raise ConfigError(
                f"sliced={self.sliced.value} with mode={self.mode.value}, core_dims={core_dims}, "
                f"kv_format={self.kv_format.value}, aligned={self.aligned}; a sliced norm is "
                "measured for tpla in fp32, without a shared core and without fitted values"
            )
        if self.mode is Mode.MLA and self.plan.groups != 1:
            raise ConfigError(f"mla reads the whole latent; use groups=1, not {self.plan.groups}")
        if self.pv_format is PVFormat.FP8 and self.kv_format is not KVFormat.FP8:
            raise ConfigError(
                f"pv_format=fp8 adds up fp8 rows, kv_format={self.kv_format.value}; "
                "use kv_format=fp8 or pv_format=fp16"
            )
        if self.prefill < 0:
            raise ConfigError(f"prefill={self.prefill} must be at least 0")
        if self.first_scored < self.prefill:
            raise ConfigError(
                f"scored from {self.scored_from}, but positions below prefill={self.prefill} are "
                "exact; raise --score-from or lower --prefill"
            )

    @property
    def first_scored(self) -> int:
        """First position whose prediction an evaluation scores."""
        return self.prefill if self.scored_from is None else self.scored_from

    @property
    def is_exact(self) -> bool:
        """Whether this is the model itself."""
        return self.mode is Mode.MLA and self.kv_format is KVFormat.FP32


class Projected(NamedTuple):
    """What attention reads of one sequence, RoPE applied."""

    q_nope_HTN: torch.Tensor
    q_rope_HTD: torch.Tensor
    latent_TR: torch.Tensor
    rope_TD: torch.Tensor


def project(attention: Any, x_TE: torch.Tensor, rotary: Any) -> Projected:
    """Queries, latents (after their norm) and RoPE keys of a HuggingFace attention module.

    Args:
        attention: ``DeepseekV2Attention`` or ``DeepseekV3Attention``.
        x_TE: its input, one sequence.
        rotary: position embeddings as the module takes them.
    """
    if attention.q_lora_rank is None:
        q = attention.q_proj(x_TE)
    else:
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x_TE)))
    q_HT = q.unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
    q_nope, q_rope = q_HT.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], -1)
    kv = attention.kv_a_proj_with_mqa(x_TE)
    latent, k_rope = kv.split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    q_rope, k_rope = _rotate(attention, q_rope[None], k_rope[None, None], rotary)
    return Projected(q_nope, q_rope[0], attention.kv_a_layernorm(latent), k_rope[0, 0])


def up_projections(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK ``[H, N, R]`` and W_UV ``[H, V, R]`` of a HuggingFace attention module."""
    weight = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))
    w_uk, w_uv = weight.split([attention.qk_nope_head_dim, attention.v_head_dim], 1)
    return w_uk, w_uv


def query_blocks(heads: int, queries: int, keys: int) -> list[slice]:
    """Cut ``queries`` so that the logits of a block stay within a fixed number of elements."""
    step = max(1, _LOGITS_AT_ONCE // max(1, heads * keys))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


class SlicedAttention:
    """Replacement for the ``forward`` of one attention module, see :func:`install`.

    Args:
        attention: the HuggingFace module; its layer's plan holds.
        spec: how to decode.
        scales_HG: logit scales mu, ``[H, groups]``; ones where absent.
        values_GHWV: fitted value projections of TPLA's groups; slices of W_UV where absent.
        energies_G: mean square of each group's slice, where its norm is sliced.
        prefilled: whether the exact positions are computed; if not, their rows of the output are
            zero, for callers that have them already.
        keys_GHNW: fitted key projections of TPLA's groups, logit scales included.

    Raises:
        ConfigError: GLA with a number of heads that the groups do not divide.
    """

    def __init__(
        self,
        attention: Any,
        spec: DecodeSpec,
        scales_HG: torch.Tensor | None = None,
        values_GHWV: torch.Tensor | None = None,
        energies_G: torch.Tensor | None = None,
        prefilled: bool = True,
        keys_GHNW: torch.Tensor | None = None,
    ) -> None:
        if spec.mode is Mode.GLA and attention.num_heads % spec.plan.groups:
            raise ConfigError(
                f"GLA divides heads among groups: {attention.num_heads} heads, "
                f"{spec.plan.groups} groups; convert with a number of groups that divides the heads"
            )
        ones = torch.ones(attention.num_heads, spec.plan.groups)
        self.attention, self.spec = attention, spec
        self.plan = spec.plan.layer(attention.layer_idx)
        self.scales_HG = ones if scales_HG is None else scales_HG
        self.values_GHWV, self.energies_G = values_GHWV, energies_G
        self.prefilled, self.keys_GHNW = prefilled, keys_GHNW

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """HuggingFace's signature: ``[B, T, E]`` -> ``[B, T, E]``; always causal, never cached."""
        outputs = []
        for row, x_TE in enumerate(hidden_states):
            outputs.append(self._sequence(x_TE, _select(position_embeddings, row)))
        return torch.stack(outputs), None

    def _sequence(self, x_TE: torch.Tensor, rotary: Any) -> torch.Tensor:
        seen = project(self.attention, x_TE, rotary)
        prefill = min(self.spec.prefill, x_TE.shape[0])
        exact_HTV = self._prefill(seen, prefill)
        if self.energies_G is not None:
            seen = seen._replace(latent_TR=normalise_slices(seen.latent_TR, self.energies_G))
        if self.spec.sliced is Sliced.NORM:
            decoded_HTV = self._exact(seen, prefill, x_TE.shape[0])
        else:
            decoded_HTV = self._decode(seen, prefill)
        heads_HTV = torch.cat([exact_HTV, decoded_HTV], 1)
        output_TE: torch.Tensor = self.attention.o_proj(heads_HTV.transpose(0, 1).flatten(1))
        return output_TE

    def _prefill(self, seen: Projected, prefill: int) -> torch.Tensor:
        """Queries below ``prefill``: ``[H, prefill, V]``."""
        if self.prefilled:
            return self._exact(seen, 0, prefill)
        return seen.latent_TR.new_zeros(
            self.attention.num_heads, prefill, self.attention.v_head_dim
        )

    def _exact(self, seen: Projected, start: int, stop: int) -> torch.Tensor:
        """Queries ``start..stop``, unsliced: ``[H, stop - start, V]``."""
        w_uk, w_uv = up_projections(self.attention)
        context_HQR = attend(
            seen.q_nope_HTN[:, start:stop] @ w_uk,
            seen.q_rope_HTD[:, start:stop],
            seen.latent_TR[:stop],
            seen.rope_TD[:stop],
            self.attention.scaling,
        )
        return context_HQR @ w_uv.transpose(1, 2)

    def _decode(self, seen: Projected, start: int) -> torch.Tensor:
        """Queries from ``start`` on, as the decode ranks compute them: ``[H, T - start, V]``."""
        w_uk, w_uv = up_projections(self.attention)
        query_HQR = seen.q_nope_HTN[:, start:] @ w_uk
        parts = [
            self._group(seen, query_HQR, w_uv, group, start) for group in range(self.plan.groups)
        ]
        return torch.cat(parts) if self.spec.mode is Mode.GLA else torch.stack(parts).sum(0)

    def _group(
        self,
        seen: Projected,
        query_HQR: torch.Tensor,
        w_uv_HVR: torch.Tensor,
        group: int,
        start: int,
    ) -> torch.Tensor:
        """Share of one latent group, for all heads (GLA: for the group's heads)."""
        plan, mode = self.plan, self.spec.mode
        dims = rank_dims(plan, group).to(query_HQR.device)
        heads = slice(None)
        if mode is Mode.GLA:
            share = self.attention.num_heads // plan.groups
            heads = slice(group * share, (group + 1) * share)
        if self.keys_GHNW is not None:
            query_HQW = seen.q_nope_HTN[:, start:] @ self.keys_GHNW[group].to(query_HQR)
        else:
            query_HQW = query_HQR[heads][..., dims]
            if mode is Mode.TPLA:
                scale_H = self.scales_HG[heads, group].to(query_HQR)
                query_HQW[..., plan.core_dims :] *= scale_H[:, None, None]
        q_rope_HQD = seen.q_rope_HTD[heads, start:]
        context_HQW = self._attend(query_HQW, q_rope_HQD, seen, group, dims)
        if self.values_GHWV is not None:
            return context_HQW @ self.values_GHWV[group].to(context_HQW)
        if mode is Mode.TPLA:
            context_HQW[..., : plan.core_dims] *= self.spec.core_values.share(plan.groups, group)
        return context_HQW @ w_uv_HVR[heads][..., dims].transpose(1, 2)

    def _attend(
        self,
        query_HQW: torch.Tensor,
        q_rope_HQD: torch.Tensor,
        seen: Projected,
        group: int,
        dims_W: torch.Tensor,
    ) -> torch.Tensor:
        """Weighted latents ``[H, Q, W]`` of ``group``, from rows as the cache returns them."""
        rope, scaling = self.attention.qk_rope_head_dim, self.attention.scaling
        layout = LatentLayout(self.plan, group, rope, self.spec.kv_format)
        packed = pack_rows(seen.latent_TR[:, dims_W], seen.rope_TD, layout)
        if self.spec.pv_format is PVFormat.FP8:
            q_latent_QHW, q_rope_QHD = query_HQW.transpose(0, 1), q_rope_HQD.transpose(0, 1)
            out_QHW = blockwise_attention(q_latent_QHW, q_rope_QHD, packed, layout, scaling)
            return out_QHW.transpose(0, 1).to(query_HQW)
        latent_TW, rope_TD = (part.to(seen.latent_TR) for part in unpack_rows(packed, layout))
        return attend(query_HQW, q_rope_HQD, latent_TW, rope_TD, scaling)


def attend(
    query_HQW: torch.Tensor,
    q_rope_HQD: torch.Tensor,
    latent_KW: torch.Tensor,
    rope_KD: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of absorbed queries over latents; the queries are the last Q of K positions.

    Returns:
        ``[H, Q, W]``, the probability-weighted latents, softmax in float32.
    """
    heads, queries, _ = query_HQW.shape
    keys = latent_KW.shape[0]
    context = torch.empty_like(query_HQW)
    for block in query_blocks(heads, queries, keys):
        logits = (query_HQW[:, block] @ latent_KW.T + q_rope_HQD[:, block] @ rope_KD.T) * scaling
        positions_Q = torch.arange(block.start, block.stop, device=logits.device) + keys - queries
        logits = mask_future(logits.float(), positions_Q)
        context[:, block] = logits.softmax(-1).to(latent_KW) @ latent_KW
    return context


def mask_future(logits_HQK: torch.Tensor, positions_Q: torch.Tensor) -> torch.Tensor:
    """Set the logits of keys that come after their query to -inf, in place."""
    future_QK = torch.arange(logits_HQK.shape[-1], device=logits_HQK.device) > positions_Q[:, None]
    return logits_HQK.masked_fill_(future_QK, float("-inf"))


def normalise_slices(latent_TR: torch.Tensor, energies_G: torch.Tensor) -> torch.Tensor:
    """Normalise each of G equal slices by itself, then give it the mean square ``energies_G``."""
    slices_TGW = latent_TR.unflatten(-1, (len(energies_G), -1))
    own_TG1 = slices_TGW.float().square().mean(-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    factor_TG1 = (energies_G.to(own_TG1)[:, None] / own_TG1.clamp_min(tiny)).sqrt()
    return (slices_TGW * factor_TG1.to(slices_TGW)).flatten(-2)


def rank_dims(plan: ShardPlan, group: int) -> torch.Tensor:
    """Latent dims that ``group``'s rank stores: the core, then its slice."""
    start, stop = plan.slice_bounds(group)
    return torch.cat([torch.arange(plan.core_dims), torch.arange(start, stop)])


def install(
    layer: nn.Module,
    spec: DecodeSpec,
    scales: list[list[float]] | None = None,
    values_GHWV: torch.Tensor | None = None,
    spectrum: list[float] | None = None,
    prefilled: bool = True,
    keys_GHNW: torch.Tensor | None = None,
) -> None:
    """Make a HuggingFace decoder layer decode by ``spec``.

    Args:
        layer: ``DeepseekV2DecoderLayer`` or ``DeepseekV3DecoderLayer``; changed in place.
        spec: how to decode.
        scales: the manifest's logit scales of this layer, ``[head][group]``; used by TPLA alone.
        values_GHWV: the layer's fitted value projections, likewise.
        spectrum: the manifest's shares of energy along the layer's dims; needed by a sliced norm.
        prefilled: as in :class:`SlicedAttention`.
        keys_GHNW: the layer's fitted key projections; used by TPLA alone.
    """
    attention: Any = layer.self_attn
    tpla = spec.mode is Mode.TPLA
    scales_HG = torch.tensor(scales) if tpla and scales else None
    energies_G = None
    if spec.sliced is not Sliced.SOFTMAX:
        # The normalised latent's squares sum to R, so a slice's mean is its share times G.
        shares_G = torch.tensor(spectrum).unflatten(0, (spec.plan.groups, -1)).sum(1)
        energies_G = shares_G * spec.plan.groups
    values_GHWV, keys_GHNW = (
        fitted if tpla and spec.aligned else None for fitted in (values_GHWV, keys_GHNW)
    )
    attention.forward = SlicedAttention(
        attention, spec, scales_HG, values_GHWV, energies_G, prefilled, keys_GHNW
    )


def uninstall(layer: nn.Module) -> None:
    """Undo :func:`install`."""
    attention: Any = layer.self_attn
    attention.__dict__.pop("forward", None)


def attention_error(model: LayeredModel, layer: Any, hidden: Sequence[torch.Tensor]) -> float:
    """Squared error of an installed attention's output over the exact output's energy.

    Args:
        model: whose layer it is.
        layer: a decoder layer with :func:`install` done; its ``prefill`` positions do not count.
        hidden: inputs of the layer, ``[T, E]`` each.
    """
    attention = layer.self_attn
    installed = attention.forward
    start = installed.spec.prefill
    error = energy = 0.0
    for hidden_TE in hidden:
        rotary = model.rotary(hidden_TE.shape[0])
        x_BTE = layer.input_layernorm(hidden_TE)[None]
        own_BTE, _ = installed(x_BTE, position_embeddings=rotary)
        true_BTE, _ = type(attention).forward(
            attention, x_BTE, position_embeddings=rotary, attention_mask=None
        )
        wrong_BTE = own_BTE[:, start:] - true_BTE[:, start:]
        error += float(wrong_BTE.square().sum(dtype=torch.float64))
        energy += float(true_BTE[:, start:].square().sum(dtype=torch.float64))
    return error / max(energy, torch.finfo(torch.float64).tiny)


def _rotate(
    attention: Any, q_rope: torch.Tensor, k_rope: torch.Tensor, rotary: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(attention, v2.DeepseekV2Attention):
        q, k = v2.apply_rotary_emb(q_rope, k_rope, rotary)
    elif attention.config.rope_interleave:
        q, k = v3.apply_rotary_pos_emb_interleave(q_rope, k_rope, *rotary)
    else:
        q, k = v3.apply_rotary_pos_emb(q_rope, k_rope, *rotary)
    return q, k


def _select(rotary: Any, row: int) -> Any:
    """Position embeddings of one sequence of a batch (they may be shared by all)."""
    if isinstance(rotary, tuple):
        return tuple(_select(part, row) for part in rotary)
    return rotary[min(row, rotary.shape[0] - 1)][None]
