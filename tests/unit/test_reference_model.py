"""The embedded reference model: size, tokenizer, template, agreement with HuggingFace, answers."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from tpla.convert.reference import latent
from tpla.convert.reference.checkpoint import load_checkpoint
from tpla.convert.reference.conversations import Message, draw_conversation, task_question
from tpla.convert.reference.model import LARGE_SHAPE, ModelShape, ReferenceModel
from tpla.convert.reference.questions import recall_questions, summary
from tpla.convert.reference.score import HuggingFaceModel, encoded_chats
from tpla.convert.reference.tokenizer import CHAT_TEMPLATE, encode_chats, render

FOLDER = Path(__file__).parents[2] / "deploy" / "reference_model"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hf_model() -> HuggingFaceModel:
    return HuggingFaceModel(FOLDER, CPU)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_folder_is_below_16_mb_and_is_what_the_script_writes() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 16_000_000
    assert json.loads((FOLDER / "config.json").read_text()) == ModelShape().hf_config()
    assert (FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_the_large_shape_has_deepseeks_latent_and_100_million_parameters() -> None:
    config = LARGE_SHAPE.hf_config()
    assert (config["kv_lora_rank"], config["max_position_embeddings"]) == (512, 8192)
    with torch.device("meta"):
        model = ReferenceModel(LARGE_SHAPE)
    assert 95e6 < sum(p.numel() for p in model.parameters()) < 105e6


def test_tokenizer_round_trip_and_single_digits(tokenizer: Tokenizer) -> None:
    for text in ("My locker code is 4821.", "Grüße, 東京 & \t tabs\n", "Anna's red box: 17+25"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    digits = [tokenizer.token_to_id(d) for d in "9075"]
    assert tokenizer.encode("9075").ids == digits
    assert tokenizer.encode("code 9075").ids[-4:] == digits


def test_chat_template_equals_render_and_encoding(
    hf_model: HuggingFaceModel, tokenizer: Tokenizer
) -> None:
    rng = Random(11)
    for _ in range(20):
        chat = draw_conversation(rng)
        messages = [m.as_dict() for m in chat]
        text = hf_model.tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == render(chat)
        ids = hf_model.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == encode_chats(tokenizer, [chat])[0][0].tolist()


def test_chat_template_prompts_and_refuses_unknown_roles(hf_model: HuggingFaceModel) -> None:
    apply = hf_model.tokenizer.apply_chat_template
    prompt = apply(
        [{"role": "user", "content": " Hello "}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|bos|><|user|>Hello<|end|><|assistant|>"
    with pytest.raises(TemplateError, match="unknown role tool"):
        apply([{"role": "tool", "content": "x"}], tokenize=False)


def test_answers_alone_have_full_weight(tokenizer: Tokenizer) -> None:
    chat = [Message("user", "Hello"), Message("assistant", "Hello! How can I help you?")]
    ids, weights = encode_chats(tokenizer, [chat])[0]
    weighted = ids[weights == 1.0].tolist()
    assert tokenizer.decode(weighted, skip_special_tokens=False) == (
        "Hello! How can I help you?<|end|>"
    )


def test_training_network_equals_huggingface(hf_model: HuggingFaceModel) -> None:
    model = load_checkpoint(FOLDER, CPU)
    tokens = torch.randint(6, 1024, (200,), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 120, 200], dtype=torch.int32)
    positions = torch.cat((torch.arange(120), torch.arange(80)))
    with torch.no_grad():
        ours = model(tokens, positions, bounds, 120)
        parts = [hf_model.model(tokens[None, a:b]).logits[0] for a, b in ((0, 120), (120, 200))]
    torch.testing.assert_close(ours, torch.cat(parts), atol=2e-3, rtol=1e-3)


def test_slicing_without_rotation_hurts_and_pca_does_not(tokenizer: Tokenizer) -> None:
    model = load_checkpoint(FOLDER, CPU)
    chats = encoded_chats(tokenizer, "unit test", 4)
    short = [latent.EncodedChat(c.tokens[:400], c.weights[:400]) for c in chats]
    identity = [torch.eye(model.shape.latent)] * model.shape.layers
    latents: list[list[torch.Tensor]] = [[] for _ in identity]
    for chat in short:
        latent.run(model, chat.tokens, identity, 1, latents)
    pca, _ = latent.principal_bases(latents)

    def loss(bases: list[torch.Tensor], groups: int) -> float:
        return latent.perplexities(model, short, bases, groups)["answer_tokens"] - 1.0

    exact, rotated = loss(identity, 1), loss(pca, 1)
    assert rotated == pytest.approx(exact, abs=2e-5), "a rotation alone changes nothing"
    assert loss(identity, 4) > 4 * exact
    assert loss(pca, 2) < loss(identity, 2)


@pytest.mark.parametrize(("distance", "count"), [(150, 18), (1500, 2)])
def test_recall_is_exact(hf_model: HuggingFaceModel, distance: int, count: int) -> None:
    questions = recall_questions(hf_model.count_tokens, distance, count)
    figures = summary(hf_model.reply(questions, batch=2))
    assert figures["exact"] >= 0.9, figures["wrong"]


@pytest.mark.parametrize("kind", ["addition", "list", "story", "small_talk"])
def test_tasks_are_exact(hf_model: HuggingFaceModel, kind: str) -> None:
    rng = Random(f"unit test/{kind}")
    replies = hf_model.reply([task_question(rng, kind) for _ in range(20)], batch=20)
    figures = summary(replies)
    assert figures["exact"] >= 0.9, figures["wrong"]
