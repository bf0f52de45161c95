"""SGLang's own flags: what we add to them, read of them, and refuse among them.

SGLang accepts flags that mean another pool, other processes or another check of a prompt than TPLA
has. Some of them would be without effect and some would give wrong answers, so they are refused.
"""

from __future__ import annotations

import argparse

from tpla.core.config import Role, Transfer, WorkerConfig
from tpla.core.errors import ConfigError
from tpla.workers.ports import free_ports
from tpla.workers.sglang_plugin.names import CUDA_ATTENTION_BACKEND
from tpla.workers.sglang_plugin.targets import SGLANG_VERSION

TRANSFER_BACKENDS = {Transfer.ZMQ: "tpla_zmq", Transfer.NCCL: "tpla_nccl"}

DEFAULT_HOST = "127.0.0.1"

_TP_SIZE = ("--tp-size", "--tensor-parallel-size", "--tp")
_DP_SIZE = ("--dp-size", "--data-parallel-size", "--dp")
_READ_SHORT = ("--tp", "--dp")
"""Short for flags of SGLang, whose parser completes them, and read as such here."""

_ADAPTERS = (
    "decode multiplies by its own copies of kv_b_proj, to which no adapter is added; serve a "
    "checkpoint that the adapter has been merged into"
)
_BY_TOKENS = (
    "pages are migrated as whole ones and decode's pool is divided by latent dims, not by tokens; "
    "use --tp-size, with --mode tpla to divide the latent"
)
_DECODES_OWN = "only the plug-in's attention reads decode's rows; leave it out"
_OF_PROMPTS = "decode computes no prompts, and its ranks fetch each one whole; leave it out"
_REFUSED = {
    "--allow-auto-truncate": "prefill and decode would cut a prompt to the pools of their own; "
    "shorten prompts before they are sent",
    "--tokenizer-worker-num": "processes of their own for tokenizing load no plug-in; leave it out",
    "--model-path": "the checkpoint is checked, and served, as --model; use that alone",
    "--disaggregation-mode": "a worker's role is its first word, prefill or decode; use that alone",
    "--disaggregation-transfer-backend": "rows are converted on their way by TPLA's own transfer; "
    "use --transfer",
    "--config": "the flags in a file are not looked at; write them on the command line",
    "--enable-lora": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--dcp-size": _BY_TOKENS,
    "--decode-context-parallel-size": _BY_TOKENS,
}
_REFUSED_BY_DECODE = {
    "--enable-hierarchical-cache": "its host memory knows SGLang's own rows alone, not TPLA's; "
    "serve it on prefill workers",
    "--disaggregation-decode-enable-offload-kvcache": "its host memory knows SGLang's own rows "
    "alone, not TPLA's; leave it out",
    "--disaggregation-decode-enable-radix-cache": "a retracted request whose prefix is cached then "
    "loses pages, which ends the worker, and prompts would begin with rows of generated tokens, "
    "which are not exact; leave it out, prefill caches prefixes",
    "--enable-memory-saver": "it cannot release TPLA's pool; leave it out",
    "--kv-cache-dtype": "decode's rows are what --kv-format says; use that",
    "--attention-backend": _DECODES_OWN,
    "--decode-attention-backend": _DECODES_OWN,
    "--prefill-attention-backend": _DECODES_OWN,
    "--attn-cp-size": _OF_PROMPTS,
    "--attention-context-parallel-size": _OF_PROMPTS,
    "--enable-prefill-cp": _OF_PROMPTS,
    "--enable-prefill-context-parallel": _OF_PROMPTS,
    "--enable-dsa-prefill-context-parallel": _OF_PROMPTS,
    "--enable-nsa-prefill-context-parallel": _OF_PROMPTS,
}
_TIERED_CACHES = {
    *("--enable-hierarchical-cache", "--enable-lmcache", "--enable-flexkv"),
    "--radix-cache-backend",
}
_HARMLESS = {
    "--tokenizer-worker-num": "1",
    "--dcp-size": "1",
    "--decode-context-parallel-size": "1",
    "--kv-cache-dtype": "auto",
    "--attn-cp-size": "1",
    "--attention-context-parallel-size": "1",
    "--disaggregation-transfer-backend": "fake",
}
"""Values that leave SGLang as it is without the flag, or a benchmark's rows that come from nowhere.
Each belongs to its flag: an adapter may be called auto."""

_EXACT_DTYPES = {"auto", "bf16", "bfloat16"}


def refuse_what_cannot_be_served(role: Role, arguments: tuple[str, ...]) -> None:
    """Look for flags of SGLang that mean something else than TPLA has.

    Raises:
        ConfigError: there is one.
    """
    refused = _REFUSED | (_REFUSED_BY_DECODE if role is Role.DECODE else {})
    given = _names(arguments)
    for flag, reason in refused.items():
        if flag in given and option(arguments, flag) != _HARMLESS.get(flag):
            raise ConfigError(f"{flag}: {reason}")
    dtype = option(arguments, "--kv-cache-dtype") or "auto"
    if dtype not in _EXACT_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {dtype}: prefill is exact and decode's rows are made of what it "
            "caches; leave it out, and give decode --kv-format fp8"
        )


def refuse_what_sglang_would_complete(command_line: list[str]) -> None:
    """Look for beginnings of SGLang's flags, and for words that belong to none.

    SGLang takes a beginning for the flag, but flags are refused, and read, by their whole names.

    Raises:
        ConfigError: there are some.
    """
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="tpla worker", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for name in _READ_SHORT:
        parser.add_argument(name)
    _, unknown = parser.parse_known_args(command_line)
    if unknown:
        raise ConfigError(
            f"{' '.join(unknown)}: not flags of SGLang {SGLANG_VERSION} as it names them; write "
            "them out, as in --tp-size 2"
        )


def sglang_command_line(config: WorkerConfig, sglang_arguments: tuple[str, ...]) -> list[str]:
    """Arguments for SGLang's own server: our defaults, then the user's."""
    given = _names(sglang_arguments)
    defaults = {
        "--model-path": config.model,
        "--disaggregation-mode": config.role.value,
        "--disaggregation-transfer-backend": TRANSFER_BACKENDS[config.transfer],
        "--host": DEFAULT_HOST,
    }
    if not replicated(sglang_arguments):
        # SGLang's own choice is a port for outgoing connections, which may be taken by the time
        # that the ranks meet there. Replicas need one each, which SGLang holds for them.
        defaults["--nccl-port"] = str(*free_ports(1))
    if config.device == "cpu":
        # --max-total-tokens bounds the pool. The fraction is of memory that all processes of the
        # host share: a small one makes a worker refuse to start because others start beside it.
        defaults |= {"--device": "cpu", "--dtype": "float32", "--mem-fraction-static": "0.8"}
        # SGLang's own choice, xgrammar, has no CPU form: a request with a grammar ends the worker.
        defaults["--grammar-backend"] = "llguidance"
    else:
        # Kernels read BF16 activations and, fastest, pages of 64; both roles share the page size.
        defaults |= {"--dtype": "bfloat16", "--page-size": "64"}
        if config.role is Role.DECODE:
            defaults["--attention-backend"] = CUDA_ATTENTION_BACKEND
    arguments = [part for pair in defaults.items() if pair[0] not in given for part in pair]
    if "--enable-metrics" not in given:
        arguments.append("--enable-metrics")
    return [*arguments, *sglang_arguments]


def replicated(arguments: tuple[str, ...]) -> bool:
    """Whether SGLang runs whole replicas of the model beside one another."""
    return "--enable-dp-attention" not in arguments and whole_number(arguments, *_DP_SIZE) > 1


def attention_ranks(arguments: tuple[str, ...], device: str) -> int:
    """Ranks that share a request's attention: all, or those of one data-parallel rank."""
    tp_size = whole_number(arguments, *_TP_SIZE)
    if "--enable-dp-attention" not in arguments:
        return tp_size
    if device == "cpu":
        raise ConfigError(
            "--enable-dp-attention: SGLang's gathers between data-parallel ranks have no CPU form; "
            "leave it out, or serve with --device cuda"
        )
    dp_size = whole_number(arguments, *_DP_SIZE)
    if tp_size % dp_size:
        raise ConfigError(f"--tp-size {tp_size} is not a multiple of --dp-size {dp_size}")
    return tp_size // dp_size


def whole_number(arguments: tuple[str, ...], *names: str, default: int = 1) -> int:
    """Value of an SGLang flag of so many names, at least its default.

    Raises:
        ConfigError: it is no such number.
    """
    text = option(arguments, *names) or str(default)
    if not text.isdigit() or int(text) < default:
        raise ConfigError(f"{names[0]} {text!r} is not a whole number of {default} or more")
    return int(text)


def caches_beyond_the_device(arguments: tuple[str, ...]) -> bool:
    """Whether prefixes may have to be fetched from a host's memory, or from elsewhere."""
    return bool(_names(arguments) & _TIERED_CACHES)


def _names(arguments: tuple[str, ...]) -> set[str]:
    """The flags among the arguments, without their values."""
    return {argument.partition("=")[0] for argument in arguments}


def option(arguments: tuple[str, ...], *names: str) -> str | None:
    """Value of an SGLang flag, given as ``--name value`` or ``--name=value``; the last one counts,
    as it does for SGLang."""
    found = None
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in names:
            found = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
    return found
