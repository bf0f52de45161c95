"""Sliced attention against HuggingFace's and against the definition, one query at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.checkpoints import LATENT, logits_of, make_checkpoint, some_ids
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.layers import LayeredModel, run_layer
from tpla.convert.sliced_attention import (
    CoreValues,
    DecodeSpec,
    Mode,
    Sliced,
    install,
    normalise_slices,
    project,
    uninstall,
)
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, LatentLayout, ModelPlan, ShardPlan
from tpla.kernels.ref.latent_rows import pack_rows, unpack_rows

FAMILIES: dict[str, dict[str, Any]] = {
    "v2": {"family": "v2"},
    "v2-q_lora-bias": {"family": "v2", "q_lora_rank": 48, "attention_bias": True},
    "v3": {"family": "v3"},
    "v3-rope-halves": {"family": "v3", "rope_interleave": False},
}
TOKENS = 21
WHOLE = ModelPlan(LATENT, 1, (0, 0))


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eval") / "model", **FAMILIES[request.param])


@pytest.mark.parametrize("prefill", [0, 1, 40, 96, 200])
@pytest.mark.parametrize("mode", [Mode.MLA, Mode.TPLA, Mode.GLA])
def test_one_group_is_mla(checkpoint: Path, mode: Mode, prefill: int) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for layer in model.model.layers:
        install(
            layer,
            DecodeSpec(mode, WHOLE, KVFormat.FP32, prefill),
            [[1.0]] * 4,
        )
    with torch.no_grad():
        logits = model(some_ids(), use_cache=False).logits
    assert (logits - logits_of(checkpoint, some_ids())).abs().max() <= 1e-4


def test_layers_one_at_a_time_are_the_whole_model(checkpoint: Path) -> None:
    model = LayeredModel(Checkpoint(checkpoint), torch.device("cpu"))
    hidden = model.embed(list(some_ids()))
    with torch.no_grad():
        for index in range(model.layers):
            layer = model.layer(index)
            hidden = [run_layer(layer, h, model.rotary(h.shape[0])) for h in hidden]
        logits = torch.stack([model.head()(h) for h in hidden])
    assert (logits - logits_of(checkpoint, some_ids())).abs().max() <= 1e-4


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("mode", [Mode.TPLA, Mode.GLA])
@pytest.mark.parametrize(("groups", "core_dims"), [(2, 0), (2, 16), (4, 8)])
def test_sliced_attention_is_its_definition(
    checkpoint: Path, mode: Mode, groups: int, core_dims: int, kv_format: KVFormat
) -> None:
    plan = ShardPlan(LATENT, groups, core_dims)
    scales = (0.5 + torch.rand(4, groups)).tolist()
    layer, attention, x, rotary = _layer(checkpoint)
    model_plan = ModelPlan(LATENT, groups, (0, core_dims))  # the layer is the second
    install(layer, DecodeSpec(mode, model_plan, kv_format, prefill=9), scales)
    with torch.no_grad():
        output, _ = attention(x[None], position_embeddings=rotary)
        uninstall(layer)
        exact, _ = attention(x[None], position_embeddings=rotary, attention_mask=None)
        core_shares = [1.0] * groups if mode is Mode.GLA else [1.0] + [0.0] * (groups - 1)
        expected = _definition(attention, x, rotary, plan, scales, core_shares, mode, kv_format)
    torch.testing.assert_close(output[0, :9], exact[0, :9], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output[0, 9:], expected[9:], rtol=1e-4, atol=1e-4)
    assert (output[0, 9:] - exact[0, 9:]).abs().max() > 0.05, "slicing must be seen at all"


def test_averaged_values_of_the_core_come_from_every_group_alike(checkpoint: Path) -> None:
    layer, attention, x, rotary = _layer(checkpoint)
    plan = ModelPlan(LATENT, 4, (0, 8))
    spec = DecodeSpec(Mode.TPLA, plan, KVFormat.FP32, core_values=CoreValues.AVERAGED)
    install(layer, spec)
    ones, core_shares = [[1.0] * 4] * 4, [0.25] * 4
    with torch.no_grad():
        output, _ = attention(x[None], position_embeddings=rotary)
        expected = _definition(
            attention, x, rotary, plan.layer(1), ones, core_shares, Mode.TPLA, KVFormat.FP32
        )
    torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_equal_halves_and_scale_two_are_mla(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family, duplicated=True)
    reference = logits_of(folder, some_ids())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for scale, agrees in ((2.0, True), (1.0, False)):
        for layer in model.model.layers:
            spec = DecodeSpec(Mode.TPLA, ModelPlan(LATENT, 2, (0, 0)), KVFormat.FP32)
            install(layer, spec, [[scale, scale]] * 4)
        with torch.no_grad():
            logits = model(some_ids(), use_cache=False).logits
        assert ((logits - reference).abs().max() <= 1e-4) == agrees


def test_a_coarser_cache_is_further_from_the_model(checkpoint: Path) -> None:
    layer, attention, x, rotary = _layer(checkpoint)
    errors = []
    with torch.no_grad():
        exact, _ = attention(x[None], position_embeddings=rotary, attention_mask=None)
        for kv_format in (KVFormat.FP32, KVFormat.BF16, KVFormat.FP8):
            install(layer, DecodeSpec(Mode.MLA, WHOLE, kv_format))
            output, _ = attention(x[None], position_embeddings=rotary)
            uninstall(layer)
            errors.append(float((output - exact).square().mean().sqrt()))
    assert errors[0] < 1e-5 < errors[1] < errors[2]


@pytest.mark.parametrize("sliced", [Sliced.NORM, Sliced.BOTH])
def test_the_norm_of_one_slice_is_the_norm(checkpoint: Path, sliced: Sliced) -> None:
    layer, attention, x, rotary = _layer(checkpoint)
    attention.kv_a_layernorm.weight.data.fill_(1)  # as conversion leaves it
    spec = DecodeSpec(Mode.TPLA, WHOLE, KVFormat.FP32, 9, aligned=False, sliced=sliced)
    with torch.no_grad():
        exact, _ = attention(x[None], position_embeddings=rotary, attention_mask=None)
        install(layer, spec, spectrum=[1 / LATENT] * LATENT)
        output, _ = attention(x[None], position_embeddings=rotary)
    torch.testing.assert_close(output, exact, rtol=1e-4, atol=1e-4)


def test_a_sliced_norm_sees_its_slice_alone() -> None:
    latent, energies = torch.randn(5, 12), torch.tensor([2.0, 0.5, 0.25])
    slices = normalise_slices(latent, energies).view(5, 3, 4)
    torch.testing.assert_close(slices.square().mean(-1), energies.expand(5, 3))
    assert torch.equal(slices.sign(), latent.view(5, 3, 4).sign())
    louder = torch.cat([latent[:, :4], 3 * latent[:, 4:]], 1)
    torch.testing.assert_close(normalise_slices(louder, energies).view(5, 3, 4), slices)


def test_specs_that_make_no_sense_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="groups=1"):
        DecodeSpec(Mode.MLA, ModelPlan(64, 2, (0, 0)), KVFormat.FP32)
    with pytest.raises(ConfigError, match="prefill=-1"):
        DecodeSpec(Mode.TPLA, ModelPlan(64, 2, (0, 0)), KVFormat.FP32, -1)
    with pytest.raises(ConfigError, match=r"sliced=norm with mode=tpla, core_dims=0\.\.16"):
        DecodeSpec(
            Mode.TPLA, ModelPlan(64, 2, (0, 16)), KVFormat.FP32, aligned=False, sliced=Sliced.NORM
        )
    layer, *_ = _layer(checkpoint)
    with pytest.raises(ConfigError, match="4 heads, 8 groups"):
        install(layer, DecodeSpec(Mode.GLA, ModelPlan(64, 8, (0, 0)), KVFormat.FP32))


def _layer(checkpoint: Path) -> tuple[Any, Any, torch.Tensor, Any]:
    """A layer, its attention, the attention's input ``[T, E]`` and position embeddings."""
    model = LayeredModel(Checkpoint(checkpoint), torch.device("cpu"))
    layer: Any = model.layer(1)
    hidden = model.embed([some_ids(1, TOKENS)[0]])[0]
    with torch.no_grad():
        return layer, layer.self_attn, layer.input_layernorm(hidden), model.rotary(TOKENS)


def _definition(
    attention: Any,
    x: torch.Tensor,
    rotary: Any,
    plan: ShardPlan,
    scales: list[list[float]],
    core_shares: list[float],
    mode: Mode,
    kv_format: KVFormat,
) -> torch.Tensor:
    """Each rank in turn, one head and one query at a time."""
    seen = project(attention, x, rotary)
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    weight = attention.kv_b_proj.weight.view(4, nope + value, LATENT)
    core = plan.core_dims
    heads_of = {g: range(4) for g in range(plan.groups)}
    if mode is Mode.GLA:
        share = 4 // plan.groups
        heads_of = {g: range(g * share, (g + 1) * share) for g in range(plan.groups)}
    output = torch.zeros(len(x), 4, value)
    for group in range(plan.groups):
        start, stop = plan.slice_bounds(group)
        kept = torch.cat([seen.latent_TR[:, :core], seen.latent_TR[:, start:stop]], 1)
        layout = LatentLayout(plan, group, attention.qk_rope_head_dim, kv_format)
        rows, rope = unpack_rows(pack_rows(kept, seen.rope_TD, layout), layout)
        for head in heads_of[group]:
            key, val = weight[head, :nope], weight[head, nope:]
            mu = scales[head][group] if mode is Mode.TPLA else 1.0
            for t in range(len(x)):
                query = seen.q_nope_HTN[head, t]
                logits = rows[: t + 1, :core] @ (query @ key[:, :core])
                logits = logits + mu * (rows[: t + 1, core:] @ (query @ key[:, start:stop]))
                logits = logits + rope[: t + 1] @ seen.q_rope_HTD[head, t]
                probs = (logits * attention.scaling).softmax(-1)
                output[t, head] += val[:, start:stop] @ (probs @ rows[: t + 1, core:])
                core_value = val[:, :core] @ (probs @ rows[: t + 1, :core])
                output[t, head] += core_shares[group] * core_value
    result: torch.Tensor = attention.o_proj(output.flatten(1))
    return result
