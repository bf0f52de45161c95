"""The configuration tree: frozen values, parsed and validated in this package alone."""

from tpla.core.config.router import (
    Policy,
    RouterConfig,
    WorkerAddress,
    parse_router_config,
)
from tpla.core.config.worker import (
    FaultPlan,
    Mode,
    Role,
    Transfer,
    TransferTimeouts,
    WorkerConfig,
    parse_worker_config,
    worker_config_from_environment,
)

__all__ = [
    "FaultPlan",
    "Mode",
    "Policy",
    "Role",
    "RouterConfig",
    "Transfer",
    "TransferTimeouts",
    "WorkerAddress",
    "WorkerConfig",
    "parse_router_config",
    "parse_worker_config",
    "worker_config_from_environment",
]
