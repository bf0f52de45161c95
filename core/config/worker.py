"""Configuration of one worker (a prefill or decode server and all its ranks)."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tpla.core.config.environment import WORKER_CONFIG_VARIABLE, read
from tpla.core.config.validation import Seconds, explain
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, PVFormat


class Role(str, Enum):
    """Which half of the disaggregated pair a worker is."""

    PREFILL = "prefill"
    DECODE = "decode"


class Mode(str, Enum):
    """What decode does with the latent; prefill is exact MLA in each."""

    TPLA = "tpla"
    SNAPMLA = "snapmla"
    MLA = "mla"


class Transfer(str, Enum):
    """Data plane of KV migration."""

    ZMQ = "zmq"
    """Through host memory and TCP: any host, any device."""
    NCCL = "nccl"
    """Between GPUs of one host."""


class TransferTimeouts(BaseModel):
    """Upper bounds, in seconds, of every wait in a KV migration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    handshake: Seconds = 30.0
    """Decode's layout offer until prefill's answer; also connecting to a peer."""
    reserve: Seconds = 30.0
    """Prefill's wait for decode's reservation of a request."""
    push: Seconds = 30.0
    """Longest silence of a peer while a request is being migrated."""
    ack: Seconds = 30.0
    """An acknowledgement of done or abort."""


class FaultPlan(BaseModel):
    """Faults to inject into a worker's transfers, for tests and drills only.

    ``kind`` is the fault, ``after`` the number of KV chunks that pass unharmed first and ``count``
    how many are hit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[str, Field(pattern="^(flip|drop|delay|exit)$")]
    after: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=1)] = 1
    delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0


class WorkerConfig(BaseModel):
    """One worker.

    Raises:
        ConfigError: through :func:`parse_worker_config`, for values that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    model: str
    mode: Mode = Mode.TPLA
    groups: Annotated[int, Field(ge=1)] = 1
    kv_format: KVFormat = KVFormat.FP8
    pv_format: PVFormat = PVFormat.FP16
    """Decode of fp8 rows; other rows are added up in their own format."""
    scatter_output: bool = False
    """Decode in mode tpla: add up the latent groups before o_proj, whose weights are then held once
    and not by every group, for one more collective a layer."""
    transfer: Transfer = Transfer.ZMQ
    timeouts: TransferTimeouts = TransferTimeouts()
    device: Annotated[str, Field(pattern="^(cpu|cuda)$")] = "cpu"
    instance_id: str
    """Names this process among its predecessors at the same address."""
    fault: FaultPlan | None = None

    @model_validator(mode="after")
    def _consistent(self) -> WorkerConfig:
        if self.mode is Mode.TPLA and self.role is Role.DECODE and self.groups < 2:
            raise ValueError(
                f"mode tpla with groups={self.groups}; use groups >= 2, or mode snapmla or mla"
            )
        if self.mode is not Mode.TPLA and self.groups != 1:
            raise ValueError(
                f"mode {self.mode.value} keeps the latent whole, groups={self.groups}; "
                "use groups=1 or mode tpla"
            )
        if self.scatter_output and self.mode is not Mode.TPLA:
            raise ValueError(
                f"scatter_output adds up latent groups, of which mode {self.mode.value} has one; "
                "leave --scatter-output out, or use mode tpla"
            )
        if self.transfer is Transfer.NCCL and self.device != "cuda":
            raise ValueError(
                f"transfer nccl moves rows between GPUs, device={self.device}; "
                "use --transfer zmq, or --device cuda"
            )
        return self

    @model_validator(mode="after")
    def _formats_fit(self) -> WorkerConfig:
        if self.mode is Mode.SNAPMLA and self.kv_format is not KVFormat.FP8:
            raise ValueError(f"mode snapmla is fp8, kv_format={self.kv_format.value}; use mode mla")
        if self.mode is Mode.MLA and self.kv_format is KVFormat.FP8:
            raise ValueError("mode mla is exact, kv_format=fp8; use bf16, fp32 or mode snapmla")
        if self.device == "cuda" and self.kv_format is KVFormat.FP32:
            raise ValueError("kv_format=fp32 is for --device cpu; on GPUs use bf16 or fp8")
        if self.pv_format is PVFormat.FP8 and self.kv_format is not KVFormat.FP8:
            raise ValueError(
                f"pv_format=fp8 adds up fp8 rows, kv_format={self.kv_format.value}; "
                "leave --pv-format out, or use fp8 rows in mode tpla or snapmla"
            )
        return self


def parse_worker_config(values: dict[str, object]) -> WorkerConfig:
    """Build a worker's configuration from plain values.

    Raises:
        ConfigError: a value is unknown, malformed or inconsistent; the message names it.
    """
    try:
        return WorkerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def worker_config_from_environment() -> WorkerConfig | None:
    """The configuration that the launching process left for this one, if any.

    Raises:
        ConfigError: the variable is set but malformed.
    """
    text = read(WORKER_CONFIG_VARIABLE)
    if not text:
        return None
    try:
        return WorkerConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{WORKER_CONFIG_VARIABLE}: {explain(error)}") from error
