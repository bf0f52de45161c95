"""Names under which SGLang knows our attention backends."""

CPU_ATTENTION_BACKEND = "tpla_torch"
CUDA_ATTENTION_BACKEND = "tpla"
