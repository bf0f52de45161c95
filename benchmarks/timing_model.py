"""Checkpoint folders without weights: true shapes, timed with ``--load-format dummy``.

``benchmarks/configs`` holds DeepSeek-V3 and Kimi-K2 with every mixture of experts replaced by its
shared expert (the TPLA paper's timing set-up) and DeepSeek-V2-Lite whole. Their tokenizer, where
text is sent, has one word for each token: a text has as many tokens as words.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tpla.core.checkpoint import Manifest, fingerprint
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import ModelPlan

CONFIGS = Path(__file__).resolve().parent / "configs"


def model_names() -> list[str]:
    """What can be timed."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def write_timing_model(name: str, groups: int, directory: Path, layers: int | None = None) -> Path:
    """Make a folder that a worker serves with ``--load-format dummy``.

    Args:
        name: one of :func:`model_names`.
        groups: latent groups; with two or more the folder has a manifest of plain slices.
        directory: where to make it.
        layers: fewer layers than the model has.

    Raises:
        ConfigError: no such model.
    """
    path = CONFIGS / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"no model {name}; choose from {', '.join(model_names())}")
    config = json.loads(path.read_text())
    if layers is not None:
        config["num_hidden_layers"] = layers
    folder = directory / f"{name}-g{groups}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # A fingerprint needs a tensor; SGLang's dummy loader reads none.
    save_file({"timing": torch.zeros(1)}, folder / "model.safetensors")
    if groups > 1:
        mark = fingerprint(folder)
        ones = [[1.0] * groups] * config["num_attention_heads"]
        scales = [ones] * config["num_hidden_layers"]
        plan = ModelPlan(config["kv_lora_rank"], groups, (0,) * config["num_hidden_layers"])
        Manifest(plan, "identity", "one", scales, [], mark, mark).save(folder)
    return folder


def write_timing_tokenizer(model: Path) -> None:
    """Give a timing model a tokenizer of its vocabulary's size, and a chat template that adds
    nothing."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    # No special token may be the beginning of a word: it would be cut off.
    special = {"<unknown>": 0, "<end>": 1}
    words = special | {f"w{index}": index for index in range(len(special), size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(model)
