"""Decode-only alignment: what it must leave alone, what it must gain, and how it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.unit.checkpoints import LATENT, make_checkpoint, write_text
from tpla.convert.alignment import Alignment, ValueStatistics, sliced_values
from tpla.convert.calibrate import Recipe, calibrate_on_text
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.layers import LayeredModel
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.reference import text as generator
from tpla.convert.reference.conversations import draw_conversation
from tpla.convert.reference.facts import Split
from tpla.convert.reference.tokenizer import encode_chats
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import CoreValues, Mode, up_projections
from tpla.core.checkpoint import MANIFEST_NAME, VALUES_TENSOR, Manifest, values_path
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan, ShardPlan

REFERENCE_MODEL = Path(__file__).parents[2] / "deploy" / "reference_model"
OPTIONS = ConversionOptions(max_tokens=512, context=128, alignment=Alignment.VALUES)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_what_is_exact_stays_as_it_is(text: Path, tmp_path: Path) -> None:
    """Equal halves with logit scale 2 read exactly what the whole latent reads."""
    folder = make_checkpoint(tmp_path / "model", duplicated=True)
    model = LayeredModel(Checkpoint(folder), torch.device("cpu"))
    recipe = Recipe(
        ModelPlan(LATENT, 2, (0, 0)), Method.IDENTITY, LogitScale.FIT, alignment=Alignment.VALUES
    )
    ids = torch.randint(0, 256, (128,), generator=torch.Generator().manual_seed(1))
    for result in calibrate_on_text(model, [ids], recipe):
        assert result.decode.values_GHWV is not None
        _, w_uv_HVR = up_projections(model.layer(result.layer).self_attn)
        gamma_R = model.layer(result.layer).self_attn.kv_a_layernorm.weight
        start = sliced_values(w_uv_HVR * gamma_R, recipe.plan.layer(result.layer))
        fitted = result.decode.values_GHWV.transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(fitted.float(), start, rtol=1e-3, atol=1e-4)


def test_a_projection_that_explains_the_output_is_found() -> None:
    """Start from wrong projections: the fit returns to those that give the exact output."""
    generator = torch.Generator().manual_seed(3)
    plan, heads, tokens = ShardPlan(8), 2, 200

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    class Seen:
        q_nope_HTN, q_rope_HTD = normal(heads, tokens, 4), normal(heads, tokens, 2)
        latent_TR, rope_TD = normal(tokens, 8), normal(tokens, 2)

    w_uk, w_uv = normal(heads, 4, 8), normal(heads, 3, 8)
    statistics = ValueStatistics(heads, 3, plan, torch.device("cpu"))
    statistics.update(Seen, w_uk, w_uv, w_uk[None], 0.3)  # type: ignore[arg-type]
    fitted = statistics.solve(torch.zeros(heads, 8, 3))
    torch.testing.assert_close(fitted.float(), w_uv.transpose(1, 2), rtol=0.01, atol=0.01)


def test_the_core_counts_once_in_the_slices() -> None:
    w_uv_HVR = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(4))
    start = sliced_values(w_uv_HVR, ShardPlan(12, 2, 4)).unflatten(1, (2, 8))
    assert torch.equal(start[:, 0], w_uv_HVR[..., :8].transpose(1, 2))
    assert (start[:, 1, :4] == 0).all()
    assert torch.equal(start[:, 1, 4:], w_uv_HVR[..., 8:].transpose(1, 2))
    averaged = sliced_values(w_uv_HVR, ShardPlan(12, 2, 4), CoreValues.AVERAGED)
    averaged = averaged.unflatten(1, (2, 8))
    assert torch.equal(averaged[:, 0, :4], averaged[:, 1, :4])
    torch.testing.assert_close(averaged[:, :, :4].sum(1), start[:, 0, :4])
    assert torch.equal(averaged[:, :, 4:], start[:, :, 4:])


@pytest.fixture(scope="module")
def held_out() -> list[torch.Tensor]:
    """Chats of the reference model's generator that no calibration below has seen."""
    tokenizer = Tokenizer.from_file(str(REFERENCE_MODEL / "tokenizer.json"))
    rng, found = Random("alignment test"), []
    while len(found) < 4:
        chats = encode_chats(tokenizer, [draw_conversation(rng) for _ in range(8)])
        ids = torch.cat([torch.from_numpy(ids.astype("int64")) for ids, _ in chats])
        if len(ids) >= 512:
            found.append(ids[:512])
    return found


@pytest.fixture(scope="module")
def figures(
    held_out: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """KL to exact MLA on held-out text, of ways to decode in four groups."""
    folder = tmp_path_factory.mktemp("alignment")
    calibration = folder / "calibration.jsonl"
    generator.main(calibration, 20, 5, Split.TRAIN, 1900)
    found = {}
    base = ConversionOptions(groups=4, calibration=calibration, max_tokens=4096, context=512)
    for name, options in {
        "no core": replace(base, alignment=Alignment.NONE),
        "core": replace(base, core_dims=32, alignment=Alignment.NONE),
        "aligned": replace(base, core_dims=32, alignment=Alignment.VALUES),
    }.items():
        convert_checkpoint(REFERENCE_MODEL, folder / name, options)
        subject = Subject(folder / name)
        modes = [(Mode.TPLA, 256)]
        if name == "core":
            modes += [(Mode.GLA, 256), (Mode.TPLA, 0)]
        specs = [subject.spec(mode, KVFormat.FP32, prefill, 256) for mode, prefill in modes]
        for row in evaluate_specs(subject, held_out, specs, 512):
            found[f"{name} {row.mode} {row.prefill}"] = row.kl
    return found


def test_alignment_lowers_the_divergence_on_text_it_has_not_seen(figures: dict[str, float]) -> None:
    assert figures["aligned tpla 256"] < 0.85 * figures["core tpla 256"], figures


def test_a_shared_core_is_better_than_none(figures: dict[str, float]) -> None:
    assert figures["core tpla 256"] < 0.5 * figures["no core tpla 256"], figures


def test_gla_is_far_worse_than_tpla(figures: dict[str, float]) -> None:
    assert figures["core gla 256"] > 5 * figures["core tpla 256"], figures


def test_exact_prefill_is_better_than_none(figures: dict[str, float]) -> None:
    assert figures["core tpla 256"] < figures["core tpla 0"], figures


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_lie_beside_the_checkpoint_in_its_dtype(
    text: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    source = make_checkpoint(tmp_path / "source")
    options = replace(OPTIONS, calibration=text, core_dims=8, dtype=dtype)
    manifest = convert_checkpoint(source, tmp_path / "out", options)
    manifest.check_values(tmp_path / "out")
    assert manifest.alignment == "values" and manifest == Manifest.load(tmp_path / "out")
    for layer in range(2):
        values = load_file(values_path(tmp_path / "out", layer))[VALUES_TENSOR]
        assert values.shape == (2, 4, 8 + 28, 32)
        assert values.dtype == (dtype or torch.float32)


@pytest.mark.parametrize("damage", ["changed", "absent"])
def test_damaged_values_are_refused(text: Path, tmp_path: Path, damage: str) -> None:
    source = make_checkpoint(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out", replace(OPTIONS, calibration=text))
    path = values_path(tmp_path / "out", 1)
    if damage == "absent":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="convert the model again"):
        Subject(tmp_path / "out")


def test_another_conversion_leaves_no_values_behind(text: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "once", replace(OPTIONS, calibration=text))
    options = replace(OPTIONS, calibration=text, alignment=Alignment.NONE)
    manifest = convert_checkpoint(tmp_path / "once", tmp_path / "twice", options)
    assert not manifest.aligned
    names = {path.name for path in (tmp_path / "twice").iterdir()}
    assert MANIFEST_NAME in names and "tpla_decode" not in names


def test_alignment_is_the_default_where_there_is_text_and_asks_for_it_where_not(
    text: Path, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source")
    without = ConversionOptions(method=Method.HADAMARD, logit_scale=LogitScale.ONE)
    assert not convert_checkpoint(source, tmp_path / "a", without).aligned
    with_text = replace(without, calibration=text, max_tokens=256, context=128)
    assert convert_checkpoint(source, tmp_path / "b", with_text).aligned
    one_group = replace(with_text, groups=1)
    assert not convert_checkpoint(source, tmp_path / "c", one_group).aligned
    with pytest.raises(ConfigError, match="--align none"):
        convert_checkpoint(source, tmp_path / "d", replace(without, alignment=Alignment.VALUES))
