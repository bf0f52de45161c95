"""Layers that are HuggingFace's, and what the served DeepSeek-V2 has beyond them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import YARN, make_checkpoint, some_ids, write_text
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.layers import LayeredModel, run_layer
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import Budget, survey

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"
GROUPED = {
    "q_lora_rank": 48,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}


def test_routing_limited_to_groups_calibrates_and_plans(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "v2", **GROUPED)
    options = ConversionOptions(
        calibration=write_text(tmp_path / "text.txt"), max_tokens=1024, context=128
    )
    convert_checkpoint(source, tmp_path / "out", options)
    assert all(c.kl > 0 for c in survey(source, options, Budget(), measured=True))


def test_routing_limited_to_groups_asks_experts_of_one_group(tmp_path: Path) -> None:
    model = _model(make_checkpoint(tmp_path / "source", "v2", **GROUPED))
    layer: Any = model.layer(1)
    hidden_TE = model.embed([some_ids(1)[0]])[0]
    with torch.no_grad():
        assert run_layer(layer, hidden_TE, model.rotary(len(hidden_TE))).isfinite().all()
        experts_TK, _ = layer.mlp.route_tokens_to_experts(layer.mlp.gate(hidden_TE)[None])
    halves_TK = experts_TK // 2
    assert torch.equal(halves_TK[:, 0], halves_TK[:, 1]) and len(halves_TK.unique()) == 2


def test_logits_of_v2_lite_are_scaled_as_served(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepseek-v2-lite.json").read_text())
    kept = ("rope_scaling", "qk_nope_head_dim", "qk_rope_head_dim", "max_position_embeddings")
    source = make_checkpoint(tmp_path / "source", "v2", **{key: config[key] for key in kept})
    attention: Any = _model(source).layer(0).self_attn
    assert attention.scaling == pytest.approx(_served(config["rope_scaling"], 192**-0.5))
    assert attention.scaling == pytest.approx(0.1147, abs=5e-5)


@pytest.mark.parametrize("family", ["v2", "v3"])
@pytest.mark.parametrize("rope", [None, YARN, {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}])
def test_logits_are_scaled_as_served(
    tmp_path: Path, family: str, rope: dict[str, Any] | None
) -> None:
    source = make_checkpoint(tmp_path / "source", family, rope_scaling=rope)
    attention: Any = _model(source).layer(0).self_attn
    assert attention.scaling == pytest.approx(_served(rope or {}, 48**-0.5))


def _model(folder: Path) -> LayeredModel:
    return LayeredModel(Checkpoint(folder), torch.device("cpu"))


def _served(rope_scaling: dict[str, Any], base: float) -> float:
    """SGLang's own; imported late, for it takes seconds."""
    from sglang.srt.configs.model_config import compute_mla_mscale_scaling

    return float(compute_mla_mscale_scaling(rope_scaling, base)) if rope_scaling else base
