"""Tiny DeepSeek-style checkpoints with random weights and a byte tokenizer, for CPU tests.

Weights are drawn wide: with HuggingFace's narrow initialisation all logits are nearly equal, and
any attention at all would pass a comparison.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PreTrainedTokenizerFast,
)

from tpla.convert.block_fp8 import SCALE_SUFFIX, BlockFP8
from tpla.convert.checkpoint_io import Checkpoint

LATENT = 64
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SHAPE = {
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "topk_group": 1,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make_checkpoint(
    directory: Path,
    family: str = "v2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    duplicated: bool = False,
    **config: Any,
) -> Path:
    """Write a tiny checkpoint with a tokenizer.

    Args:
        directory: where.
        family: ``v2`` or ``v3`` (which has yarn RoPE and a router bias).
        seed: of the weights.
        dtype: of the weights.
        max_shard_size: below the model's size for a sharded checkpoint.
        duplicated: make both halves of every latent equal, so that TPLA with two groups and a
            logit scale of 2 is MLA exactly.
        config: replaces fields of the config.
    """
    if family == "v3":
        fields = {"n_group": 2, "q_lora_rank": 48, "rope_scaling": YARN, **_SHAPE, **config}
        hf_config = DeepseekV3Config(num_hidden_layers=fields.pop("num_hidden_layers", 2), **fields)
    else:
        fields = {"n_group": 1, "q_lora_rank": None, **_SHAPE, **config}
        hf_config = DeepseekV2Config(num_hidden_layers=fields.pop("num_hidden_layers", 2), **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config)
        _draw_weights(model)
    if duplicated:
        _duplicate_latent(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of one token a byte, BOS before each text, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    fast.save_pretrained(directory)


def write_text(path: Path, characters: int = 3000, seed: int = 0) -> Path:
    """Random words."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(1, 7))) for _ in range(99)]
    text = " ".join(generator.choices(words, k=characters // 2))
    path.write_text(text[:characters])
    return path


def quantize_checkpoint(directory: Path, rows: int = 32, columns: int = 32, **extra: Any) -> None:
    """Turn the linear weights of a single-file checkpoint into block FP8."""
    path = directory / "model.safetensors"
    block = BlockFP8(rows, columns, extra.get("scale_fmt") == "ue8m0")
    tensors = {}
    for name, tensor in load_file(path).items():
        if name.endswith("proj.weight") or "_proj_with_mqa.weight" in name:
            tensors[name], tensors[name + SCALE_SUFFIX] = block.quantize(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(
        directory,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [rows, columns],
            **extra,
        },
    )


def dequantized(directory: Path) -> Path:
    """A copy of a block-FP8 checkpoint in float32, which HuggingFace's classes load anywhere."""
    copy = directory.with_name(f"{directory.name}-float32")
    if copy.exists():
        return copy
    shutil.copytree(directory, copy)
    source = Checkpoint(directory)
    for file in source.files:
        names = [name for name in load_file(directory / file) if not name.endswith(SCALE_SUFFIX)]
        plain = {name: source.load(name).float() for name in names}
        save_file(plain, copy / file, metadata={"format": "pt"})
    edit_config(copy, quantization_config=None, dtype="float32")
    return copy


def edit_config(directory: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    removed = {key for key, value in fields.items() if value is None}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))


def logits_of(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, T, V]`` of HuggingFace's own model in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def some_ids(batch: int = 2, tokens: int = 96, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[B, T]``."""
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _draw_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layernorm" in name or name == "model.norm.weight":
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
        elif "embed" in name:
            parameter.normal_()
        elif name.endswith("bias"):
            parameter.normal_(0, 0.3)
        else:
            wide = 1.6 if "q_" in name or "kv_" in name else 1.0
            parameter.normal_(0, wide / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.1 * torch.randn_like(buffer))


@torch.no_grad()
def _duplicate_latent(model: Any) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        half = attention.kv_lora_rank // 2
        down, norm, up = (
            attention.kv_a_proj_with_mqa.weight,
            attention.kv_a_layernorm.weight,
            attention.kv_b_proj.weight,
        )
        down[half : 2 * half] = down[:half]
        norm[half:] = norm[:half]
        up[:, half:] = up[:, :half]
