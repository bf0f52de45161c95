"""What our KV manager, senders and receivers make of SGLang's; no server is started."""

from __future__ import annotations

import pytest

from tests.contract.test_sglang_hooks import WORKER, in_worker_process

_MANAGER = """
import json, threading
from collections import defaultdict
from types import SimpleNamespace as Names
import numpy as np
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from tpla.workers.sglang_plugin.kv_manager import TplaKVManager, TplaKVReceiver, TplaKVSender

def manager(**attributes):
    made = object.__new__(TplaKVManager)
    made.request_status, made.failure_records, made.room_metadata = {}, {}, {}
    made.failure_lock, made.connection_lock = threading.Lock(), threading.Lock()
    made.addr_to_rooms_tracker, made.connection_pool = defaultdict(set), {}
    made._addresses_of_peer, made.prefill_info_table = {}, {}
    vars(made).update(attributes)
    return made
"""

_RESERVE = """
class Event:
    def record(self, stream):
        self.stream = stream

torch.cuda.Event = Event
found = []
for on_device in (True, False):
    reserved = {}
    stream = "forward" if on_device else None
    decode = manager(_forward_stream=stream, receiver=Names(reserve=reserved.__setitem__))
    receiver = TplaKVReceiver(decode, "a:1", 5)
    receiver.bootstrap_infos = [{"is_dummy": False, "rank_ip": "127.0.0.1", "rank_port": 1}]
    receiver.required_dst_info_num = 1
    receiver.send_metadata(np.array([3, 4], np.int32), 0)
    vacated = reserved[5].vacated
    found.append(vacated.stream if vacated else None)
print("RESULT" + json.dumps(found))
"""

_LOSE = """
class Table(dict):
    def __contains__(self, key):
        found = super().__contains__(key)
        if found:
            thread = threading.Thread(target=decode._on_peer_lost, args=("tcp://p",))
            thread.start()
            thread.join()
        return found

decode = manager(prefill_info_table=Table({"a:1": Names()}))
decode.remember_peer("tcp://p", "a:1")
receiver = TplaKVReceiver(decode, "a:1", 5)
receiver.init(0)
failed = receiver.poll() == KVPoll.Failed
print("RESULT" + json.dumps([failed, decode.failure_records[5]]))
"""

_REPLICAS = """
def common(self, *args, **kwargs):
    self.system_dp_size, self.system_dp_rank, self.attn_dp_rank = SIZE, 1, 0
    self.server_socket = Names(close=lambda linger: None)

CommonKVManager.__init__ = common
made = TplaKVManager(None, None, None)
server = Names(dp_size=2, load_balance_method="follow_bootstrap_room")
opened = []
vars(made).update(vars(manager(attn_dp_rank=made.attn_dp_rank, server_args=server,
                               is_dummy_cp_rank=DUMMY, sender=Names(open=opened.append))))
senders = [TplaKVSender(made, "a:1", room, [0], 0) for room in (7, 8)]
failed = [sender.poll() == KVPoll.Failed for sender in senders]
print("RESULT" + json.dumps([failed, opened]))
"""


def test_rows_wait_for_the_steps_that_were_begun_when_their_pages_were_given_away() -> None:
    found, _ = in_worker_process(_MANAGER + _RESERVE)
    assert found == ["forward", None]


def test_a_prefill_worker_that_is_lost_while_it_is_looked_up_fails_the_request_alone() -> None:
    found, _ = in_worker_process(_MANAGER + _LOSE)
    assert found == [True, "prefill at a:1 is gone"]


@pytest.mark.parametrize(
    ("size", "dummy", "expected"),
    [
        # A room goes to the replica that it is a multiple of.
        (2, False, [[False, True], [7, 8]]),
        # Data-parallel attention's ranks are SGLang's to tell apart: this one has rank 0.
        (1, False, [[True, False], [7, 8]]),
        # A context-parallel rank that sends nothing has no room that could expire.
        (2, True, [[False, False], []]),
    ],
)
def test_prefill_opens_the_rooms_that_are_its_own(
    size: int, dummy: bool, expected: list[list[object]]
) -> None:
    script = _REPLICAS.replace("SIZE", str(size)).replace("DUMMY", str(dummy))
    found, _ = in_worker_process(_MANAGER + script, worker={**WORKER, "role": "prefill"})
    assert found == expected
