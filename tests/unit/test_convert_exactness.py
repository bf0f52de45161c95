"""A converted checkpoint is the same model: HuggingFace computes the same logits from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.checkpoints import LATENT, logits_of, make_checkpoint, some_ids, write_text
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method
from tpla.core.checkpoint import Manifest, fingerprint

MODELS: dict[str, dict[str, Any]] = {
    "v2-q_proj": {"family": "v2"},
    "v2-q_lora-bias": {"family": "v2", "q_lora_rank": 48, "attention_bias": True},
    "v2-dense-tied": {"family": "v2", "first_k_dense_replace": 2, "tie_word_embeddings": True},
    "v3": {"family": "v3"},
    "v3-sharded": {"family": "v3", "max_shard_size": "300KB"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return make_checkpoint(folder, **MODELS[request.param])


@pytest.fixture(scope="module")
def source_logits(source: Path) -> torch.Tensor:
    return logits_of(source, some_ids())


@pytest.mark.parametrize("method", list(Method))
def test_logits_agree(
    source: Path, source_logits: torch.Tensor, text: Path, tmp_path: Path, method: Method
) -> None:
    options = ConversionOptions(
        method=method, calibration=text, max_tokens=512, context=128, learning_steps=20
    )
    convert_checkpoint(source, tmp_path / "out", options)
    difference = (logits_of(tmp_path / "out", some_ids()) - source_logits).abs().max()
    assert difference <= 1e-4
    assert source_logits.std() > 0.3, "logits that are all alike would prove nothing"


def test_the_rotation_really_changes_the_weights(source: Path, text: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text, max_tokens=99))
    before, after = _tensors(source), _tensors(tmp_path / "out")
    touched = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {name.split("self_attn.")[-1] for name in touched} >= {
        "kv_a_proj_with_mqa.weight",
        "kv_b_proj.weight",
        "kv_a_layernorm.weight",
    }
    assert all("self_attn.kv_" in name for name in touched)
    for name in touched:
        if name.endswith("kv_a_layernorm.weight"):
            assert torch.equal(after[name], torch.ones(LATENT))
        if "kv_a_proj" in name:
            assert torch.equal(before[name][LATENT:], after[name][LATENT:]), "RoPE rows stay"


def test_files_and_their_tensors_keep_their_places(
    source: Path, text: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text, max_tokens=99))
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {
        "tpla.json",
        "tpla_decode",
    }
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as old, safe_open(tmp_path / "out" / path.name, "pt") as new:
            assert set(old.keys()) == set(new.keys())
            assert old.metadata() == new.metadata()
    index = source / "model.safetensors.index.json"
    if index.exists():
        old_map = json.loads(index.read_text())["weight_map"]
        assert json.loads((tmp_path / "out" / index.name).read_text())["weight_map"] == old_map
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_the_manifest_describes_the_conversion(source: Path, text: Path, tmp_path: Path) -> None:
    options = ConversionOptions(calibration=text, max_tokens=300, context=128, core_dims=16)
    written = convert_checkpoint(source, tmp_path / "out", options)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest == written
    assert (manifest.plan.kv_lora_rank, manifest.plan.groups, manifest.plan.core) == (
        LATENT,
        2,
        16,
    )
    assert (manifest.method, manifest.logit_scale) == ("pca", "fit")
    assert manifest.fingerprint == fingerprint(tmp_path / "out")
    assert manifest.source_fingerprint == fingerprint(source)
    assert manifest.fingerprint != manifest.source_fingerprint
    assert torch.tensor(manifest.logit_scales).shape == (2, 4, 2)
    for layer in manifest.spectrum:
        assert sum(layer) == pytest.approx(1.0)
        assert layer == pytest.approx(sorted(layer, reverse=True))
    assert manifest.calibration["tokens"] == 300
    assert manifest.calibration["path"] == "text.txt"


def test_a_converted_checkpoint_converts_again(
    source: Path, source_logits: torch.Tensor, text: Path, tmp_path: Path
) -> None:
    options = ConversionOptions(calibration=text, max_tokens=300, context=128)
    convert_checkpoint(source, tmp_path / "once", options)
    hadamard = ConversionOptions(groups=4, method=Method.HADAMARD, logit_scale=LogitScale.ENERGY)
    convert_checkpoint(tmp_path / "once", tmp_path / "twice", hadamard)
    assert (logits_of(tmp_path / "twice", some_ids()) - source_logits).abs().max() <= 1e-4
    assert Manifest.load(tmp_path / "twice").plan.groups == 4


def test_the_same_command_writes_the_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    options = ConversionOptions(calibration=text, max_tokens=200, context=128)
    for name in ("a", "b"):
        convert_checkpoint(source, tmp_path / name, options)
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert tmp_path / "a" / "tpla_decode" / "layer-00001.safetensors" in files
    for path in files:
        other = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == other.read_bytes(), path.name


def test_wider_weights_make_a_bfloat16_checkpoint_exact(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "bf16", "v3", dtype=torch.bfloat16)
    reference = logits_of(source, some_ids())
    for dtype, limit in ((torch.float32, 1e-4), (None, 0.3)):
        out = tmp_path / f"out-{dtype}"
        convert_checkpoint(source, out, ConversionOptions(calibration=text, dtype=dtype))
        assert (logits_of(out, some_ids()) - reference).abs().max() <= limit
        wanted = dtype or torch.bfloat16
        tensors = _tensors(out)
        assert {t.dtype for n, t in tensors.items() if n.endswith("proj.weight")} == {wanted}
    narrow = tmp_path / "narrow"
    convert_checkpoint(
        tmp_path / "out-torch.float32",
        narrow,
        ConversionOptions(calibration=text, dtype=torch.bfloat16),
    )
    for name, tensor in _tensors(narrow).items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (_tensors(source)[name].dtype if bias else torch.bfloat16)
    assert json.loads((narrow / "config.json").read_text())["dtype"] == "bfloat16"


def test_layers_behind_the_last_decoder_layer_are_copied(text: Path, tmp_path: Path) -> None:
    """Multi-token prediction layers carry the next layer number; TPLA does not slice them."""
    source = make_checkpoint(tmp_path / "model", "v3", num_hidden_layers=3)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text, max_tokens=99))
    before, after = _tensors(source), _tensors(tmp_path / "out")
    last = [name for name in before if name.startswith("model.layers.2.")]
    assert last
    assert all(torch.equal(before[name], after[name]) for name in last)
    assert len(Manifest.load(tmp_path / "out").logit_scales) == 2


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors
