"""Aborted requests that SGLang's prefill scheduler drops: nothing of their rooms stays.

The scheduler's own methods run on a stand-in that has the queues, with real senders and decode
ranks over ZMQ.
"""

from __future__ import annotations

import pytest

from tests.contract.test_sglang_hooks import WORKER, in_worker_process

SENDER = """
import json, threading
from types import SimpleNamespace as Names
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.disaggregation.base.conn import KVPoll
from tests.unit.transfer_pair import Pair, eventually
from tpla.workers.sglang_plugin.kv_manager import TplaKVManager, TplaKVSender

pair = Pair("zmq", 1)
manager = object.__new__(TplaKVManager)
manager.request_status, manager.failure_records = {}, {}
manager.failure_lock = threading.Lock()
manager.req_to_decode_prefix_len, manager.room_metadata, manager.transfer_infos = {}, {}, {}
manager.is_dummy_cp_rank = manager.enable_all_cp_ranks_for_transfer = False
manager.server_args = Names(dp_size=1)
manager.sender = pair.sender
pair.sender._events = manager

sender = TplaKVSender(manager, "a:1", 1, [0], 0)
pair.reserve(1, [1, 2, 3])
assert eventually(lambda: sender.poll() == KVPoll.WaitingForInput)
sender.init(3, 0)
"""
"""A prefill sender of room 1, three pages, for which one decode rank has reserved its own."""

_ABORT = """
from unittest.mock import MagicMock
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as module
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

module.release_kv_cache = module.prepare_abort = lambda *args, **kwargs: None
request = Names(rid="r", disagg_kv_sender=sender, pending_bootstrap=False, mamba_pool_idx=None,
                metadata_buffer_index=-1, time_stats=MagicMock(), to_finish=None)
place = "PLACE"
scheduler = Names(
    waiting_queue=[request] if place == "waiting" else [],
    chunked_req=request if place == "chunked" else None,
    _pending_chunked_abort_req=None, enable_hicache_storage=False, ipc_channels=MagicMock(),
    disaggregation_mode=DisaggregationMode.PREFILL, tree_cache=MagicMock(), dllm_config=None,
    req_to_metadata_buffer_idx_allocator=MagicMock(), grammar_manager=MagicMock(),
    disagg_prefill_bootstrap_queue=Names(queue=[]), disagg_prefill_inflight_queue=[],
    ps=Names(pp_size=1), running_batch=None, last_batch=None,
)
Scheduler.abort_request(scheduler, AbortReq(rid="r"))
Scheduler.process_pending_chunked_abort(scheduler)
dropped = not scheduler.waiting_queue and scheduler.chunked_req is None
told = eventually(lambda: 1 in pair.ranks[0].events.failed)
rooms = pair.sender.accounting()["rooms"]
held = rooms + len(manager.request_status) + len(manager.failure_records)
pair.close()
print("RESULT" + json.dumps({"dropped": dropped, "decode told": told, "held": held}))
"""


@pytest.mark.parametrize("place", ["waiting", "chunked"])
def test_nothing_stays_of_an_aborted_request_that_the_scheduler_drops(place: str) -> None:
    found, _ = in_worker_process(
        SENDER + _ABORT.replace("PLACE", place), worker={**WORKER, "role": "prefill"}
    )
    assert found == {"dropped": True, "decode told": True, "held": 0}
