"""The systems that the serving benchmark puts side by side: command lines of their workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tpla.core.config import Role
from tpla.workers.deployment import ProcessPlan

_SERVER_FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"),
    *("--grammar-backend", "none"),
)
_DECODE_ALONE = ("--disaggregation-transfer-backend", "fake")


@dataclass(frozen=True)
class ServingSystem:
    """One way to serve.

    Attributes:
        name: in the report.
        groups: latent groups; one is head-sharded MLA.
        kv_format: of decode's cache.
        tpla_mode: mode of ``tpla worker``, or None for SGLang alone.
        flags: for decode, beyond those that all systems share.
        dp: attention data parallelism.
        dcp: decode context parallelism.
    """

    name: str
    groups: int
    kv_format: str
    tpla_mode: str | None = None
    flags: tuple[str, ...] = ()
    dp: int = 1
    dcp: int = 1

    @property
    def pools(self) -> int:
        """Ranks that hold tokens of their own: a worker reports the tokens of one."""
        return self.dp * self.dcp


_PREFILL = ("--page-size", "64", "--dtype", "bfloat16")
_PV_FP8 = ("--pv-format", "fp8")
_FLASHMLA = ("--attention-backend", "flashmla", "--page-size", "64", "--dtype", "bfloat16")
_FP8_KV = ("--kv-cache-dtype", "fp8_e4m3")
_DP = ("--enable-dp-attention", "--dp", "{tp}")
# SGLang 0.5.16 does not take FlashMLA's log-sum-exp, which context parallelism needs.
_FLASHINFER = ("--attention-backend", "flashinfer", "--dtype", "bfloat16")
SYSTEMS = (
    ServingSystem("sglang-bf16", 1, "bf16", flags=_FLASHMLA),
    ServingSystem("sglang-fp8", 1, "fp8", flags=(*_FLASHMLA, *_FP8_KV)),
    ServingSystem("sglang-dcp", 1, "bf16", flags=(*_FLASHINFER, "--dcp-size", "{tp}"), dcp=2),
    ServingSystem("sglang-dp", 1, "bf16", flags=(*_FLASHMLA, *_DP), dp=2),
    ServingSystem("sglang-dp-fp8", 1, "fp8", flags=(*_FLASHMLA, *_FP8_KV, *_DP), dp=2),
    ServingSystem("tpla-fp8", 2, "fp8", tpla_mode="tpla"),
    ServingSystem(
        "tpla-fp8-no-scatter", 2, "fp8", tpla_mode="tpla", flags=("--no-scatter-output",)
    ),
    ServingSystem("tpla-fp8-pv-fp8", 2, "fp8", tpla_mode="tpla", flags=_PV_FP8),
    ServingSystem("tpla-bf16", 2, "bf16", tpla_mode="tpla"),
    ServingSystem("snapmla", 1, "fp8", tpla_mode="snapmla"),
    ServingSystem("snapmla-pv-fp8", 1, "fp8", tpla_mode="snapmla", flags=_PV_FP8),
    ServingSystem("snapmla-dp-pv-fp8", 1, "fp8", tpla_mode="snapmla", flags=(*_PV_FP8, *_DP), dp=2),
)
BASELINE = "sglang-bf16"


def worker(
    system: ServingSystem, role: Role, model: Path, tp: int, port: int, extra: tuple[str, ...]
) -> ProcessPlan:
    """A worker of ``tp`` ranks to be timed alone: its KV comes from nowhere, or goes there.

    SGLang's prefill is timed in a server that is not disaggregated: its transfer backends need
    packages of their own.
    """
    if system.tpla_mode is None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    else:
        command = [
            *(sys.executable, "-m", "tpla.core.cli", "worker", role.value, "--model", str(model)),
            *("--mode", system.tpla_mode, "--kv-format", system.kv_format),
        ]
    flags = (flag.format(tp=tp) for flag in _own_flags(system, role))
    shared = (*_SERVER_FLAGS, "--tp-size", str(tp), "--port", str(port), *extra)
    url = f"http://127.0.0.1:{port}/health"
    return ProcessPlan(system.name, (*command, *flags, *shared), url)


def _own_flags(system: ServingSystem, role: Role) -> tuple[str, ...]:
    """Both systems prefill with the attention that SGLang chooses."""
    if role is Role.DECODE:
        alone = (*_DECODE_ALONE, "--disaggregation-mode", "decode")
        return (*system.flags, *(_DECODE_ALONE if system.tpla_mode else alone))
    return _PREFILL if system.tpla_mode is None else ()
