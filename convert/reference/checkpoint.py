"""Write and read the HuggingFace checkpoint of the reference model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tpla.convert.reference.model import ModelShape, ReferenceModel
from tpla.convert.reference.tokenizer import BOS_ID, END_ID, PAD_ID, save_tokenizer


def save_checkpoint(model: ReferenceModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write bf16 weights, config, generation config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = model.shape.hf_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": BOS_ID,
        "do_sample": False,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, model.shape.context)


def load_checkpoint(folder: Path, device: torch.device) -> ReferenceModel:
    """The training network in float32 from the bf16 weights."""
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        latent=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        context=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        eps=config["rms_norm_eps"],
    )
    model = ReferenceModel(shape)
    state = {k: v.float() for k, v in load_file(str(folder / "model.safetensors")).items()}
    model.load_state_dict(state)
    return model.to(device).eval()
