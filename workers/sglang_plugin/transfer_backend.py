"""Makes ``--disaggregation-transfer-backend tpla_zmq`` and ``tpla_nccl`` known to SGLang."""

from __future__ import annotations

from typing import Any

from tpla.core.config import WorkerConfig
from tpla.workers.sglang_plugin.longest_request import limit_to_pool


def add_enum_member(name: str) -> None:
    """Add ``name`` to SGLang's closed ``TransferBackend`` enum, which is called with the string."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if name in TransferBackend._value2member_map_:
        return
    member = object.__new__(TransferBackend)
    member._name_ = name.upper()
    member._value_ = name
    member.__objclass__ = TransferBackend
    member._sort_order_ = len(TransferBackend._member_names_)
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._value2member_map_[name] = member


def get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around SGLang's look-up: our classes for our backend."""
    if not transfer_backend.value.startswith("tpla_"):
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import KVClassType

    from tpla.workers.sglang_plugin import kv_manager

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: kv_manager.TplaKVManager,
        KVClassType.SENDER: kv_manager.TplaKVSender,
        KVClassType.RECEIVER: kv_manager.TplaKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: kv_manager.TplaKVBootstrapServer,
    }[class_type]


def attach_pool(config: WorkerConfig, manager: Any, queue: Any, *args: Any, **kwargs: Any) -> None:
    """After a queue made its manager: hand over the pool, of which SGLang passes only pointers.

    The pool's size is known here, too, and the scheduler's limits are not yet used.
    """
    if hasattr(manager, "attach"):
        limit_to_pool(config.role, queue.scheduler)
        manager.attach(config, queue.token_to_kv_pool, queue.scheduler)
