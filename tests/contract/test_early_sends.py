"""SGLang's prefill hands over a cached prefix while the forward that writes it may still run.

The scheduler's own methods run on a stand-in for it, with a real sender and decode rank over ZMQ.
"""

from __future__ import annotations

from tests.contract.test_dropped_requests import SENDER
from tests.contract.test_sglang_hooks import WORKER, in_worker_process

_SEND_EARLY = """
import functools
import torch
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Prefill
from tests.unit.transfer_pair import PAGE_SIZE

class Event(threading.Event):
    def record(self, stream):
        self.stream, self.looks = stream, 0
        events.append(self)

    def query(self):
        self.looks += 1
        return self.is_set()

events, torch.cuda.Event = [], Event
request = Names(disagg_kv_sender=sender, pending_bootstrap=False, host_hit_length=0,
                prefix_indices=[0] * 2 * PAGE_SIZE, start_send_idx=0, req_pool_idx=0,
                origin_input_ids=[0] * 3 * PAGE_SIZE)
scheduler = Names(enable_staging=False, enable_overlap=True, forward_stream="forward",
                  token_to_kv_pool_allocator=Names(page_size=PAGE_SIZE),
                  req_to_token_pool=Names(req_to_token=torch.arange(3 * PAGE_SIZE)[None]))
scheduler.send_kv_chunk = functools.partial(Prefill.send_kv_chunk, scheduler)
Prefill.maybe_send_cached_prefix_chunk(scheduler, request)
waits = eventually(lambda: events[0].looks > 20)
early = pair.sender.accounting()["payload_bytes"]
events[0].set()
sent = 2 * PAGE_SIZE * pair.ranks[0].pool.layout.token_bytes
arrived = eventually(lambda: pair.sender.accounting()["payload_bytes"] == sent)
pair.close()
print("RESULT" + json.dumps([events[0].stream, waits, early, arrived]))
"""


def test_a_cached_prefix_is_read_when_the_forward_that_writes_it_is_done() -> None:
    found, _ = in_worker_process(SENDER + _SEND_EARLY, worker={**WORKER, "role": "prefill"})
    assert found == ["forward", True, 0, True]
