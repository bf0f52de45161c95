"""What a model computes beside its weights, so that both roles can be seen to compute the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_SETTINGS = (
    *("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "rope_interleave"),
    *("first_k_dense_replace", "moe_intermediate_size", "moe_layer_freq", "n_group"),
    *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("routed_scaling_factor", "scoring_func", "topk_group", "topk_method", "vocab_size"),
)


def settings_digest(model_config: Any) -> str:
    """Digest of SGLang's model configuration, as flags and ``config.json`` have made it.

    Rows of a model with other RoPE angles or another epsilon are as long, and as well sent, as the
    right ones.
    """
    config = model_config.hf_text_config
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
