"""The end of a rank. SGLang's disaggregated loops never look at the flag that ends its other loops.

So a worker that was told to stop waited 15 seconds for ranks that went on, and killed them.
"""

from __future__ import annotations

import gc
from typing import Any

from tpla.workers.sglang_plugin.kv_manager import TplaKVManager


def leave_loop(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.handle_shutdown``, which comes when every client was answered.

    Raises:
        SystemExit: always; it passes through the loop, and SGLang gives the rank's memory back.
    """
    queue = scheduler.disagg_decode_prealloc_queue or scheduler.disagg_prefill_bootstrap_queue
    if isinstance(queue.kv_manager, TplaKVManager):
        queue.kv_manager.close()
    gc.freeze()  # the interpreter would look for cycles in all that it held, for seconds
    raise SystemExit(0)
