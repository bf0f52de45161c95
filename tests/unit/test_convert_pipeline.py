"""What a conversion refuses, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoints import edit_config, make_checkpoint, write_text
from tpla.convert import pipeline
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method
from tpla.core.checkpoint import Manifest
from tpla.core.errors import CheckpointError, ConfigError

WITHOUT_TEXT = ConversionOptions(method=Method.HADAMARD, logit_scale=LogitScale.ENERGY)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize("method", [Method.HADAMARD, Method.IDENTITY])
@pytest.mark.parametrize("logit_scale", [LogitScale.ONE, LogitScale.ENERGY])
def test_data_free_methods_need_no_text(
    source: Path, tmp_path: Path, method: Method, logit_scale: LogitScale
) -> None:
    options = ConversionOptions(method=method, logit_scale=logit_scale)
    manifest = convert_checkpoint(source, tmp_path / "out", options)
    scales = torch.tensor(manifest.logit_scales)
    if logit_scale is LogitScale.ONE:
        assert torch.equal(scales, torch.ones(2, 4, 2))
    else:
        assert scales.mean() == pytest.approx(2.0, abs=0.2)
    assert sum(manifest.spectrum[0]) == pytest.approx(1.0)
    assert manifest.calibration == {"seed": 0}


@pytest.mark.parametrize(
    "options",
    [
        ConversionOptions(method=Method.PCA, logit_scale=LogitScale.ONE),
        ConversionOptions(method=Method.IDENTITY, logit_scale=LogitScale.FIT),
    ],
)
def test_pca_and_fit_need_text(source: Path, tmp_path: Path, options: ConversionOptions) -> None:
    with pytest.raises(ConfigError, match="--calibration PATH"):
        convert_checkpoint(source, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_one_group_has_unit_scales_and_fits_nothing(source: Path, tmp_path: Path) -> None:
    options = ConversionOptions(groups=1, method=Method.HADAMARD)
    manifest = convert_checkpoint(source, tmp_path / "out", options)
    assert torch.equal(torch.tensor(manifest.logit_scales), torch.ones(2, 4, 1))


@pytest.mark.parametrize(("groups", "core_dims"), [(3, 0), (2, 63), (1, 8), (0, 0)])
def test_a_latent_that_cannot_be_divided_so_is_refused(
    source: Path, tmp_path: Path, groups: int, core_dims: int
) -> None:
    options = ConversionOptions(groups=groups, core_dims=core_dims, method=Method.IDENTITY)
    with pytest.raises(ConfigError):
        convert_checkpoint(source, tmp_path / "out", options)


def test_a_destination_with_files_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert_checkpoint(source, out, WITHOUT_TEXT)  # an empty folder is welcome
    manifest = (out / "tpla.json").read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        convert_checkpoint(source, out, WITHOUT_TEXT)
    assert (out / "tpla.json").read_bytes() == manifest


@pytest.mark.parametrize("inside", ["", "converted", "a/b"])
def test_a_destination_in_the_source_is_refused(source: Path, inside: str) -> None:
    with pytest.raises(CheckpointError, match="lies in"):
        convert_checkpoint(source, source / inside, WITHOUT_TEXT)
    assert not (source / "a").exists()


def test_a_failed_conversion_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pipeline, "_copy_other_files", fail)
    with pytest.raises(CheckpointError, match=r"no space.*free space"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_destination_appears_only_when_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(stage: str, done: int, total: int) -> None:
        assert not (tmp_path / "out").exists()

    convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT, watch)
    assert not (tmp_path / "out.tmp").exists()
    assert not list((tmp_path / "out").glob(".*"))


def test_an_unfinished_conversion_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(CheckpointError, match="remove it if none runs"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    assert (tmp_path / "out.tmp").exists()


def test_other_weights_and_hidden_files_are_not_copied(source: Path, tmp_path: Path) -> None:
    (source / ".cache").mkdir()
    (source / "figures").mkdir()
    (source / "figures" / "a.png").write_bytes(b"png")
    for name in ("pytorch_model.bin", "model.gguf", ".gitattributes", "LICENSE"):
        (source / name).write_text(name)
    convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "figures"} <= names
    assert not names & {".cache", ".gitattributes", "pytorch_model.bin", "model.gguf"}


def test_progress_reports_layers_then_files(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT, lambda *a: seen.append(a))
    assert seen == [
        ("layers", 0, 2),
        ("layers", 1, 2),
        ("layers", 2, 2),
        ("files", 0, 1),
        ("files", 1, 1),
    ]


def test_models_without_latent_attention_are_refused(source: Path, tmp_path: Path) -> None:
    edit_config(source, kv_lora_rank=None)
    with pytest.raises(CheckpointError, match="no kv_lora_rank"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    edit_config(source, kv_lora_rank=64, model_type="llama")
    with pytest.raises(CheckpointError, match=r"model_type='llama'.*deepseek_v3"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)


def test_folders_that_hold_no_checkpoint_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "out", WITHOUT_TEXT)
    (source / "model.safetensors").rename(source / "model.bin")
    with pytest.raises(CheckpointError, match=r"0 \*.safetensors"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)


def test_a_damaged_file_is_refused(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut short"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    path.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", max_shard_size="300KB")
    next(iter(source.glob("*.safetensors"))).unlink()
    with pytest.raises(CheckpointError, match="complete the download"):
        convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)


def test_a_missing_tensor_is_named(source: Path, text: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.1.mlp.experts.3.up_proj"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


def test_a_config_of_another_model_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    edit_config(source, num_attention_heads=8, num_key_value_heads=8)
    with pytest.raises(CheckpointError, match="do not belong together"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


def test_text_without_a_tokenizer_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


def test_a_tokenizer_of_another_model_is_refused(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", vocab_size=64, bos_token_id=1, eos_token_id=2)
    with pytest.raises(CheckpointError, match="does not belong to the model"):
        convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))


def test_fewer_tokens_than_a_measured_basis_has_dims_are_refused(
    source: Path, text: Path, tmp_path: Path
) -> None:
    options = ConversionOptions(calibration=text, max_tokens=63)
    with pytest.raises(ConfigError, match=r"63 calibration tokens .* kv_lora_rank=64 dims; give"):
        convert_checkpoint(source, tmp_path / "out", options)
    convert_checkpoint(source, tmp_path / "out", replace(options, max_tokens=64))
    unmeasured = replace(options, method=Method.HADAMARD)
    convert_checkpoint(source, tmp_path / "unmeasured", unmeasured)


@pytest.mark.parametrize("context", [1, 513])
def test_a_context_out_of_range_is_refused(
    source: Path, text: Path, tmp_path: Path, context: int
) -> None:
    options = ConversionOptions(calibration=text, context=context)
    with pytest.raises(ConfigError, match=r"2\.\.512"):
        convert_checkpoint(source, tmp_path / "out", options)


def test_the_source_is_not_written_to(source: Path, text: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    convert_checkpoint(source, tmp_path / "out", ConversionOptions(calibration=text))
    assert {p.name: p.read_bytes() for p in source.iterdir()} == {
        p.name: p.read_bytes() for p in Path(copy).iterdir()
    }


def test_the_manifest_is_plain_json(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", WITHOUT_TEXT)
    document = json.loads((tmp_path / "out" / "tpla.json").read_text())
    assert str(tmp_path) not in json.dumps(document)
    assert Manifest.load(tmp_path / "out").version == document["version"]
