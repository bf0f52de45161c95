"""Names under which SGLang knows our attention backends."""

TORCH_ATTENTION_BACKEND = "tpla_torch"
"""Of every worker on the CPU; on GPUs a prefill worker may be asked to use it, slow and exact."""

CUDA_ATTENTION_BACKEND = "tpla"
