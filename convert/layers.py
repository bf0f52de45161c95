"""A DeepSeek-V2 or -V3 model of which one decoder layer is in memory at a time.

The layers are HuggingFace's own modules, filled from the checkpoint tensor by tensor (block-FP8
weights are dequantised on the way), so what calibration and evaluation compute is HuggingFace's
model. DeepSeek-V2's lack two things, which are added here (:func:`_complete`).

Shape suffixes: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.hidden_states import MEMORY_BYTES, HiddenStates
from tpla.core.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
KEPT_FLOAT32 = "e_score_correction_bias"
"""The router's bias, which decides ties between experts, is never narrowed."""

_PACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class _Family:
    config: Any
    layer: Any
    rotary: Any
    norm: Any


_V2 = _Family(
    DeepseekV2Config,
    v2.DeepseekV2DecoderLayer,
    v2.DeepseekV2RotaryEmbedding,
    v2.DeepseekV2RMSNorm,
)
_V3 = _Family(
    DeepseekV3Config,
    v3.DeepseekV3DecoderLayer,
    v3.DeepseekV3RotaryEmbedding,
    v3.DeepseekV3RMSNorm,
)
_FAMILIES = {"deepseek_v2": _V2, "deepseek_v3": _V3, "kimi_k2": _V3}


class LayeredModel:
    """Parts of a checkpoint's model, each loaded when asked for.

    Attributes:
        checkpoint: where the weights come from.
        config: HuggingFace's config.
        device: where modules and hidden states live.
        dtype: of weights and hidden states.

    Raises:
        CheckpointError: not an MLA model that we know.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self._family = _family(checkpoint)
        self.config = _hf_config(checkpoint, self._family)
        self._rotary = self._family.rotary(self.config).to(device)

    @property
    def layers(self) -> int:
        """Number of decoder layers (multi-token-prediction layers behind them do not count)."""
        return int(self.config.num_hidden_layers)

    @torch.no_grad()
    def embed(
        self, sequences: Sequence[torch.Tensor], memory_bytes: int = MEMORY_BYTES
    ) -> HiddenStates:
        """Token ids ``[T]`` of each sequence to hidden states ``[T, E]``, see there."""
        table_VE = self.checkpoint.load(EMBEDDING)
        for ids_T in sequences:
            if int(ids_T.max()) >= table_VE.shape[0]:
                raise CheckpointError(
                    f"token id {int(ids_T.max())} is outside the embedding of {table_VE.shape[0]} "
                    "rows; the tokenizer does not belong to the model"
                )
        return HiddenStates(
            (table_VE[ids_T].to(self.device, self.dtype) for ids_T in sequences),
            [len(ids_T) for ids_T in sequences],
            table_VE.shape[1],
            self.dtype,
            self.device,
            memory_bytes,
        )

    def rotary(self, tokens: int) -> Any:
        """Position embeddings of positions 0..tokens-1, as the layers take them."""
        positions = torch.arange(tokens, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return self._rotary(like, positions)

    @torch.no_grad()
    def layer(self, index: int) -> nn.Module:
        """Decoder layer ``index`` with its weights; drop the reference to free it.

        Raises:
            CheckpointError: a tensor is absent or has another shape than config.json implies.
        """
        with torch.device("meta"):
            module: nn.Module = self._family.layer(self.config, index)
        module = module.to(self.dtype).to_empty(device=self.device).eval()
        for name, target in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith(KEPT_FLOAT32):
                target.data = target.data.float()
            self._fill(f"model.layers.{index}.{name}", target)
        if self._family is _V2:
            _complete(module, self.config)
        return module

    @torch.no_grad()
    def head(self) -> nn.Module:
        """Final norm and vocabulary projection: hidden ``[T, E]`` -> logits ``[T, V]``."""
        weight_VE = self.checkpoint.load(EMBEDDING if self.config.tie_word_embeddings else HEAD)
        norm = self._family.norm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        norm.weight.copy_(self.checkpoint.load(FINAL_NORM))
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(weight_VE.to(self.device, self.dtype), requires_grad=False)
        return nn.Sequential(norm.to(self.device, self.dtype), linear).eval()

    def _fill(self, name: str, target: torch.Tensor) -> None:
        packed = _PACKED.match(name)
        if packed is None or name in self.checkpoint:
            self._copy(name, target)
            return
        experts, kind = packed.groups()
        for expert in range(target.shape[0]):
            if kind == "down_proj":
                self._copy(f"{experts}{expert}.down_proj.weight", target[expert])
                continue
            gate, up = target[expert].chunk(2)
            self._copy(f"{experts}{expert}.gate_proj.weight", gate)
            self._copy(f"{experts}{expert}.up_proj.weight", up)

    def _copy(self, name: str, target: torch.Tensor) -> None:
        tensor = self.checkpoint.load(name)
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, config.json implies "
                f"{tuple(target.shape)}; config and weights do not belong together"
            )
        target.copy_(tensor)


def run_layer(layer: nn.Module, hidden_TE: torch.Tensor, rotary: Any) -> torch.Tensor:
    """Apply a decoder layer causally to one sequence: ``[T, E]`` -> ``[T, E]``."""
    # No mask: HuggingFace's SDPA attention is causal then, and allocates no T x T tensor.
    output: torch.Tensor = layer(hidden_TE[None], attention_mask=None, position_embeddings=rotary)
    return output[0]


def _complete(layer: Any, config: Any) -> None:
    """Add to a DeepSeek-V2 layer what HuggingFace's leaves out and the served model has.

    Routing within groups of experts reads their number, which the module never sets. And logits
    lack the factor that DeepSeek's code and SGLang have where yarn has mscale_all_dim: calibrated
    without it, a basis and its fits are those of flatter attention than is served.
    """
    if hasattr(layer.mlp, "gate") and not hasattr(layer.mlp, "num_experts"):
        layer.mlp.num_experts = config.n_routed_experts
    rope = config.rope_parameters
    if rope["rope_type"] != "default" and (mscale := rope.get("mscale_all_dim", 0)):
        layer.self_attn.scaling *= v3.yarn_get_mscale(rope["factor"], mscale) ** 2


def _family(checkpoint: Checkpoint) -> _Family:
    model_type = checkpoint.config.get("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{checkpoint.directory} has model_type={model_type!r}; models with latent attention "
            f"that convert: {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[model_type]


def _hf_config(checkpoint: Checkpoint, family: _Family) -> Any:
    foreign = {"quantization_config", "auto_map", "model_type", "transformers_version"}
    values = {key: value for key, value in checkpoint.config.items() if key not in foreign}
    try:
        config = family.config.from_dict(values)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"transformers refuses {checkpoint.directory}/config.json: {error}"
        ) from error
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    return config
