"""The network that trains: MLA with dense MLPs, parameter names as in HuggingFace's DeepSeek-V2.

Shapes: T tokens packed end to end, H heads, C latent dims, N no-RoPE dims, R RoPE dims,
V value dims.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpla.convert.reference.tokenizer import BOS_ID, END_ID, PAD_ID


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the reference model."""

    vocabulary: int = 1024
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    intermediate: int = 768
    latent: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 32
    context: int = 4096
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def hf_config(self) -> dict[str, object]:
        """The config.json that HuggingFace and SGLang load."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "dtype": "bfloat16",
            "eos_token_id": END_ID,
            "first_k_dense_replace": self.layers,
            "head_dim": self.rope,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "kv_lora_rank": self.latent,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": 2,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "pad_token_id": PAD_ID,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "greedy",
            "use_cache": True,
            "v_head_dim": self.value,
            "vocab_size": self.vocabulary,
        }


LARGE_SHAPE = ModelShape(
    hidden=768,
    layers=12,
    heads=16,
    intermediate=2048,
    latent=512,
    nope=64,
    value=64,
    context=8192,
)
"""About 100 million parameters with DeepSeek's latent, for figures; its weights are not kept."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], same dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE. x [T, H, R], cos and sin float32 [T, R/2] -> [T, H, R]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Causal attention inside each chat. q, k [T, H, D], v [T, H, V] -> [T, H, V]."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # flash attention wants equal dims
        out = varlen_attn(q, k, padded, bounds, bounds, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out[..., : v.shape[-1]]
    parts = []
    for start, stop in pairwise(bounds.tolist()):
        if stop > start:
            q1, k1, v1 = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True)
            parts.append(out.transpose(0, 1))
    return torch.cat(parts)


class Attention(nn.Module):
    """Multi-head latent attention without a query latent."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        s = self.shape = shape
        self.q_proj = nn.Linear(s.hidden, s.heads * (s.nope + s.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(s.hidden, s.latent + s.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(s.latent, s.eps)
        self.kv_b_proj = nn.Linear(s.latent, s.heads * (s.nope + s.value), bias=False)
        self.o_proj = nn.Linear(s.heads * s.value, s.hidden, bias=False)

    def queries_and_cache(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q_nope [T, H, N], q_rope [T, H, R], latent [T, C], k_rope [T, 1, R].

        The latent is the one before its norm.
        """
        s = self.shape
        q_nope, q_rope = self.q_proj(x).unflatten(-1, (s.heads, -1)).split([s.nope, s.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.latent, s.rope], -1)
        return q_nope, rotate(q_rope, cos, sin), latent, rotate(k_rope[:, None], cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        s = self.shape
        q_nope, q_rope, latent, k_rope = self.queries_and_cache(x, cos, sin)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, -1))
        k_nope, v = kv.split([s.nope, s.value], -1)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, s.heads, -1)), -1)
        return self.o_proj(causal_attention(q, k, v, bounds, longest).flatten(-2))


class MLP(nn.Module):
    """Gated SiLU network."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, bounds, longest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm (HuggingFace's `model.` prefix)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def blocks(self) -> list[Layer]:
        """The layers, with their type."""
        return cast("list[Layer]", list(self.layers))


class ReferenceModel(nn.Module):
    """The language model."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.rope, 2).double() / shape.rope)
        angles = torch.arange(shape.context).double()[:, None] * inverse
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal weights of variance 1/fan-in; what writes to the residual stream is smaller."""
        for name, p in self.named_parameters():
            if "embed_tokens" in name:
                p.normal_(0, 0.5)
            elif p.dim() == 2:
                residual = "o_proj" in name or "down_proj" in name
                scale = (2 * self.shape.layers) ** -0.5 if residual else 1.0
                p.normal_(0, scale * p.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, positions: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """tokens, positions int64 [T], bounds int32 [N+1] -> logits [T, vocabulary]."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.model.layers:
            x = layer(x, cos, sin, bounds, longest)
        return self.lm_head(self.model.norm(x))


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy. logits [T, vocabulary], targets int64 [T], weights float32 [T] -> []."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()
