"""Greedy TPLA decoding written from the papers' equations; shares no code with the product.

The prompt runs as ordinary MLA (HuggingFace's modules, absorbed attention in float32). Each
generated token's query attends, once a group j, to the group's stored slice::

    logits_jh = scale (q~_h,core . c_core + mu_hj q~_h,Sj . c_Sj + q_h^PE . k^PE)
    o_h       = sum_j softmax(logits_jh) c_Sj W_UV,h,Sj  (+ softmax(logits_0h) c_core W_UV,h,core)

or, where the checkpoint has value projections fitted for decode, sum_j softmax(logits_jh)
[c_core, c_Sj] W_j,h, with q~_h = q_h W_UK,h and everything cached as the storage format leaves it.
With P V in FP8 (SnapMLA) the products p_k s_k of weights and token scales are FP8 numbers, too,
relative to the largest weight and the largest scale of each 64 tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Plan:
    groups: int
    cores: list[int]  # [layer]
    scales: Any  # [layer][head][group]
    values: Any = None  # [layer][group, head, dims, value]
    keys: Any = None  # [layer][group, head, nope, dims]

    @classmethod
    def of(cls, model: Path, sliced: bool, layers: int, heads: int) -> Plan:
        if not sliced:
            return cls(1, [0] * layers, torch.ones(layers, heads, 1))
        document = json.loads((model / "tpla.json").read_text())
        plan = document["plan"]
        values = keys = None
        if document["alignment"] != "none":
            fitted = [load_file(file) for file in sorted((model / "tpla_decode").iterdir())]
            values = [layer["values"] for layer in fitted]
            keys = [layer["keys"] for layer in fitted] if "keys" in fitted[0] else None
        scales = torch.tensor(document["logit_scales"])
        return cls(plan["groups"], plan["core_dims"], scales, values, keys)


def stored(latent: torch.Tensor, rope: torch.Tensor, kv_format: str) -> tuple[Any, Any]:
    """What a decode rank reads back of latents ``[T, r]`` and RoPE keys ``[T, d]``."""
    if kv_format == "fp32":
        return latent, rope
    if kv_format == "bf16":
        return latent.bfloat16().float(), rope.bfloat16().float()
    scale = latent.abs().max(-1, keepdim=True).values / 448.0
    quantised = (latent / scale).to(torch.float8_e4m3fn).float()
    return quantised * scale, (rope / scale).bfloat16().float() * scale


def add_up_in_fp8(weights: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """Weights ``[h, 1, T]`` by latents ``[T, r]`` that FP8 rows hold: their largest is 448."""
    scale = latent.abs().max(-1).values / 448.0
    total: Any = 0
    for start in range(0, len(latent), 64):
        block = slice(start, start + 64)
        own, s = weights[..., block], scale[block]
        # Weights that are nothing in float32 stay so.
        unit = (own.amax(-1, keepdim=True) * s.max() / 448.0).clamp_min(1e-37)
        rounded = (own * s / unit).to(torch.float8_e4m3fn).float() * unit
        total = total + rounded @ (latent[block] / s[:, None])
    return total


class Attention:
    """Replaces one HuggingFace attention module's forward."""

    def __init__(
        self, module: Any, layer: int, plan: Plan, formats: tuple[str, str], rotate: Any
    ) -> None:
        self.m, self.layer, self.plan = module, layer, plan
        self.kv_format, self.pv_format = formats
        self.core = plan.cores[layer]
        self.rotate = rotate
        self.decoding = False
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def slices(self, rank: int) -> list[list[int]]:
        width = (rank - self.core) // self.plan.groups
        starts = [self.core + j * width for j in range(self.plan.groups)]
        return [list(range(start, start + width)) for start in starts]

    def __call__(self, hidden_states: Any, position_embeddings: Any = None, **_: Any) -> Any:
        m = self.m
        tokens = hidden_states.shape[1]
        heads, nope, rope, value, rank = (
            m.num_heads,
            m.qk_nope_head_dim,
            m.qk_rope_head_dim,
            m.v_head_dim,
            m.kv_lora_rank,
        )
        if m.q_lora_rank is None:
            q = m.q_proj(hidden_states)
        else:
            q = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden_states)))
        q = q.view(1, tokens, heads, nope + rope).transpose(1, 2)
        q_nope, q_rope = q.split([nope, rope], -1)
        compressed = m.kv_a_proj_with_mqa(hidden_states)
        latent, k_rope = compressed.split([rank, rope], -1)
        latent = m.kv_a_layernorm(latent)[0]
        q_rope, k_rope = self.rotate(q_rope, k_rope.view(1, 1, tokens, rope), position_embeddings)
        up = m.kv_b_proj.weight.view(heads, nope + value, rank)
        w_uk, w_uv = up[:, :nope], up[:, nope:]
        q_latent = torch.einsum("htn,hnr->htr", q_nope[0], w_uk)
        core = list(range(self.core))
        parts = self.slices(rank)
        fresh = [stored(latent[:, core + part], k_rope[0, 0], self.kv_format) for part in parts]
        if not self.decoding:
            self.cache = fresh
            out = self.exact(q_latent, q_rope[0], latent, k_rope[0, 0], w_uv)
        else:
            self.cache = [
                (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))
                for a, b in zip(self.cache, fresh, strict=True)
            ]
            out = self.sliced(q_nope[0], q_latent, q_rope[0], w_uv, core, parts)
        return m.o_proj(out.transpose(0, 1).reshape(1, tokens, heads * value)), None

    def exact(self, q_latent: Any, q_rope: Any, latent: Any, k_rope: Any, w_uv: Any) -> Any:
        logits = q_latent @ latent.T + q_rope @ k_rope.T
        tokens = logits.shape[1]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (logits * self.m.scaling).masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("htr,hvr->htv", weights @ latent, w_uv)

    def sliced(
        self, q_nope: Any, q_latent: Any, q_rope: Any, w_uv: Any, core: Any, parts: Any
    ) -> Any:
        total: Any = 0
        for j, part in enumerate(parts):
            latent, rope = self.cache[j]
            mu = self.plan.scales[self.layer, :, j].view(-1, 1, 1)
            query = torch.cat([q_latent[..., core], mu * q_latent[..., part]], -1)
            if self.plan.keys is not None:
                query = q_nope @ self.plan.keys[self.layer][j].float()
            logits = (query @ latent.T + q_rope @ rope.T) * self.m.scaling
            weights = logits.softmax(-1)
            read = add_up_in_fp8(weights, latent) if self.pv_format == "fp8" else weights @ latent
            projection = w_uv[..., core + part].clone()
            if j > 0:
                projection[..., : len(core)] = 0
            if self.plan.values is not None:
                projection = self.plan.values[self.layer][j].float().transpose(1, 2)
            total = total + torch.einsum("htr,hvr->htv", read, projection)
        return total


class Reference:
    """A checkpoint decoded greedily, one request at a time."""

    def __init__(
        self, model: Path, kv_format: str, sliced: bool = True, pv_format: str = "fp16"
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        config = self.model.config
        plan = Plan.of(model, sliced, config.num_hidden_layers, config.num_attention_heads)
        if config.model_type == "deepseek_v3":
            from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

            def rotate(q: Any, k: Any, embeddings: Any) -> Any:
                return modeling.apply_rotary_pos_emb_interleave(q, k, *embeddings)
        else:
            from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

            rotate = modeling.apply_rotary_emb
        self.attentions = []
        for index, layer in enumerate(self.model.model.layers):
            formats = (kv_format, pv_format)
            attention = Attention(layer.self_attn, index, plan, formats, rotate)
            layer.self_attn.forward = attention
            self.attentions.append(attention)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, stop: int | None = None) -> list[int]:
        """Greedy ids, ``count`` at most, the stop token included."""
        output = [int(self._prefill(prompt).argmax())]
        while len(output) < count and output[-1] != stop:
            output.append(int(self._decode(prompt, output).argmax()))
        return output

    @torch.no_grad()
    def gaps(self, prompt: list[int], ids: list[int]) -> list[float]:
        """How far below the best logit each of ``ids`` lies, every one following those before."""
        found = []
        for index, token in enumerate(ids):
            logits = self._decode(prompt, ids[:index]) if index else self._prefill(prompt)
            found.append(float(logits.max() - logits[token]))
        return found

    def _prefill(self, prompt: list[int]) -> torch.Tensor:
        for attention in self.attentions:
            attention.decoding = False
        return self.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]

    def _decode(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Logits after the last of ``output``; the ones before it have been through here."""
        for attention in self.attentions:
            attention.decoding = True
        position = torch.tensor([[len(prompt) + len(output) - 1]])
        token = torch.tensor([[output[-1]]])
        return self.model(token, position_ids=position, use_cache=False).logits[0, -1]
