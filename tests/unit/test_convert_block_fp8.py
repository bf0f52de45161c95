"""DeepSeek-V3's block-FP8 checkpoints keep their format through a conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoints import (
    LATENT,
    edit_config,
    logits_of,
    make_checkpoint,
    quantize_checkpoint,
    some_ids,
    write_text,
)
from tpla.convert.block_fp8 import BlockFP8
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.core.errors import CheckpointError, ConfigError

ROTATED = ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "kv_a_layernorm.weight")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bf16") / "model", "v3", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def source(unquantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(unquantized, tmp_path_factory.mktemp("fp8") / "model"))
    quantize_checkpoint(folder)
    return folder


def test_logits_stay_within_the_format(
    unquantized: Path, source: Path, text: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))
    original = logits_of(unquantized, some_ids())
    reference = logits_of(_dequantized(source, tmp_path / "before"), some_ids())
    converted = logits_of(_dequantized(tmp_path / "out", tmp_path / "after"), some_ids())
    # Rounding two matrices of a layer again costs less than rounding all of them did.
    assert 0 < _rms(converted - reference) < _rms(reference - original)


def test_everything_else_is_copied_bit_by_bit(source: Path, text: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        old, new = before.entry(name).load(), after.entry(name).load()
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if not name.removesuffix("_scale_inv").endswith(ROTATED):
            assert _bytes_equal(old, new), name
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            assert _bytes_equal(old[LATENT:], new[LATENT:]), "RoPE rows lie in blocks of their own"
    assert json.loads((tmp_path / "out/config.json").read_text()) == before.config


def test_a_block_that_spans_latent_and_rope_rows_is_requantised(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "v3")
    quantize_checkpoint(source, rows=48, columns=48)
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))
    reference = logits_of(_dequantized(source, tmp_path / "before"), some_ids())
    converted = logits_of(_dequantized(tmp_path / "out", tmp_path / "after"), some_ids())
    assert 0 < _rms(converted - reference) < 0.3 * _rms(reference)


@pytest.mark.parametrize("shape", [(64, 64), (80, 48), (1, 33)])
def test_quantisation_round_trip(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[:, None]
    block = BlockFP8(32, 32)
    values, scale = block.quantize(weight)
    back = block.dequantize(values, scale)
    spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    # Half a step: 2^-4 of the value, or 2^-10 of the scale among the subnormals.
    assert ((back - weight).abs() <= weight.abs() / 16 + spread * 2**-10).all()
    again, same_scale = block.quantize(back)
    assert torch.equal(again.float(), values.float())
    assert torch.allclose(same_scale, scale)


def test_scales_are_powers_of_two_where_the_checkpoint_says_so(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "v3")
    quantize_checkpoint(source, scale_fmt="ue8m0")
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))
    out = Checkpoint(tmp_path / "out")
    scale = out.load("model.layers.0.self_attn.kv_b_proj.weight_scale_inv")
    assert torch.equal(scale.log2(), scale.log2().round())


def test_another_quantisation_is_refused(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model")
    edit_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"'awq'.*block-FP8"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


def test_a_dtype_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    options = ConversionOptions(calibration=text, dtype=torch.float32)
    with pytest.raises(ConfigError, match="leave --dtype out"):
        convert_checkpoint(source, tmp_path / "out", options)


def test_scales_of_another_shape_are_refused(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "v3")
    quantize_checkpoint(source)
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    edit_config(source, quantization_config={**quantization, "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match="block scales of shape"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.o_proj.weight"]
)
def test_an_fp8_weight_without_its_scales_is_named(
    source: Path, text: Path, tmp_path: Path, name: str
) -> None:
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is FP8 without its scales"):
        convert_checkpoint(damaged, tmp_path / "out", ConversionOptions(calibration=text))


def _dequantized(source: Path, target: Path) -> Path:
    """The same checkpoint with plain float32 weights, for HuggingFace on a CPU."""
    checkpoint = Checkpoint(source)
    target.mkdir()
    names = [name for name in checkpoint.entries if not name.endswith("_scale_inv")]
    tensors = {name: checkpoint.load(name).float() for name in names}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    assert load_file(target / "model.safetensors").keys() == tensors.keys()
    (target / "config.json").write_text((source / "config.json").read_text())
    edit_config(target, quantization_config=None)
    return target


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _bytes_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
