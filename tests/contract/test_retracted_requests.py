"""Retracted requests and those beside them, with SGLang's own classes and the hooks."""

from __future__ import annotations

from tests.contract.test_sglang_hooks import in_worker_process

_WAIT = """
import json
from types import SimpleNamespace as Names
from unittest.mock import MagicMock
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.disaggregation.decode import DecodePreallocQueue, SchedulerDisaggregationDecodeMixin

RESERVED, POOL = 64, 2048
transfers = [Names(rows=20, rid=str(number)) for number in range(19)]
long = Names(rid="long", origin_input_ids=range(100), output_ids=range(735))
held = sum(each.rows for each in transfers)

class Transfers:
    queue = transfers
    def pop_transferred(self):
        done, self.queue = self.queue, []
        return done
    def extend(self, more):
        assert not more

scheduler = Names(
    enable_decode_hicache=False, enable_hisparse=False, waiting_queue=[], last_batch=None,
    running_batch=Names(reqs=[]), disagg_decode_transfer_queue=Transfers(),
    server_args=Names(disaggregation_decode_enable_offload_kvcache=False, disable_radix_cache=False,
                      disaggregation_decode_polling_interval=1,
                      disaggregation_decode_enable_radix_cache=False))
queue = object.__new__(DecodePreallocQueue)
free = lambda: POOL - held
vars(queue).update(
    scheduler=scheduler, retracted_queue=[long], num_reserved_decode_tokens=RESERVED,
    transfer_queue=scheduler.disagg_decode_transfer_queue, req_to_token_pool=MagicMock(),
    token_to_kv_pool=None, token_to_kv_pool_allocator=Names(available_size=lambda: free()),
    _pre_alloc=lambda req: None, pop_preallocated=lambda: ([], []))
queue.req_to_token_pool.available_size.return_value = 1
long.load_kv_cache = lambda *pools: None
scheduler.disagg_decode_prealloc_queue = queue

def turn():
    SchedulerDisaggregationDecodeMixin.process_decode_queue(scheduler)
    names = [each.rid for each in scheduler.waiting_queue]
    scheduler.waiting_queue.clear()
    return names

first = turn()
held = 0  # those have been answered since
print("RESULT" + json.dumps([first, turn(), turn()]))
"""


def test_a_retracted_request_does_not_keep_back_the_transfers_that_it_waits_for() -> None:
    found, _ = in_worker_process(_WAIT)
    assert found == [[str(number) for number in range(19)], ["long"], []]


_GRAMMAR = """
import json
from types import SimpleNamespace as Names
from unittest.mock import MagicMock
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.disaggregation import decode_schedule_batch_mixin as module
from transformers import AutoTokenizer

module.maybe_cache_unfinished_req = lambda *args: None
tokenizer = AutoTokenizer.from_pretrained("deploy/reference_model")
digits = [tokenizer.encode(digit, add_special_tokens=False)[-1] for digit in "0123456789"]
grammar = GuidanceBackend(tokenizer).dispatch_regex("[0-9]{3}").copy()

def allowed():
    mask = grammar.allocate_vocab_mask(0, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return sum(int(mask[0, digit // 32]) >> digit % 32 & 1 for digit in digits)

request = Names(output_ids=digits[1:2], grammar=grammar, finished=lambda: False, to_finish=None)
batch = Names(reqs=[request], tree_cache=None, device="cpu", spec_algorithm=MagicMock(),
              req_pool_indices=None)

def enter():
    module.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt(batch, None, MagicMock())
    return allowed()

found = [enter()]  # with its first token, which prefill has sampled
grammar.accept_token(digits[2])
request.output_ids.append(digits[2])
found.append(enter())  # again, retracted in between
grammar.accept_token(digits[3])
found.append(allowed())
print("RESULT" + json.dumps([found, request.to_finish]))
"""

_PENALTIES = """
import json
from array import array
from types import SimpleNamespace as Names
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.disaggregation.decode_schedule_batch_mixin import (
    ScheduleBatchDisaggregationDecodeMixin as Batch)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer, BatchedMinNewTokensPenalizer, BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer, BatchedRepetitionPenalizer)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

VOCAB, STOP = 8, 7
KINDS = {BatchedFrequencyPenalizer, BatchedMinNewTokensPenalizer, BatchedPresencePenalizer,
         BatchedRepetitionPenalizer}

def request(output, **penalties):
    sampling = Names(**{"frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0,
                        "repetition_penalty": 1.0, "stop_token_ids": None, **penalties})
    tokenizer = Names(additional_stop_token_ids=None, eos_token_id=STOP)
    return Names(sampling_params=sampling, tokenizer=tokenizer, output_ids=output,
                 origin_input_ids=[1], prefix_indices=[], extend_range=Names(length=0),
                 get_fill_ids=lambda: array("q"), req_pool_idx=0, retracted_stain=True,
                 already_computed=0, multimodal_inputs=None)

class Held(Names):  # which penalties refer to weakly
    pass

SamplingBatchInfo.from_schedule_batch = lambda batch, vocab_size: Names(
    penalizer_orchestrator=BatchedPenalizerOrchestrator(vocab_size, batch, KINDS))
every = dict(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0,
             min_new_tokens=4)

def logits(outputs, once):
    requests = [request(array("q", output[:1] if once else output), **penalties)
                for output, penalties in outputs]
    pool = Names(req_to_token=torch.zeros(1, 1, dtype=torch.int64))
    batch = Held(reqs=requests, device="cpu", return_logprob=False, req_to_token_pool=pool,
                  model_config=Names(vocab_size=VOCAB))
    Batch.prepare_for_prebuilt(batch)
    ScheduleBatch.cumulate_penalty_output_tokens(batch)
    if once:  # never retracted: each step tells the next token
        for step in range(1, len(outputs[0][0])):
            for req, (output, _) in zip(requests, outputs):
                req.output_ids.append(output[step])
            ScheduleBatch.cumulate_penalty_output_tokens(batch)
    made = torch.ones(len(outputs), VOCAB)
    batch.sampling_info.penalizer_orchestrator.apply(made)
    return made

same = []
for first in (every, {}):  # beside a request without penalties, too
    pair = [([2, 3, 3], first), ([4, 4, 5], every)]
    same.append(bool(torch.equal(logits(pair, True), logits(pair, False))))
plain = logits([([2, 3, 3], {}), ([4, 5, 6], {})], False)
uneven = logits([([2, 2, 2, 2, 3], every), ([4], every)], False)
ends = [bool(torch.isinf(row[STOP])) for row in uneven]
print("RESULT" + json.dumps([same, bool((plain == 1).all()), ends]))
"""


def test_a_request_that_goes_on_after_retraction_keeps_its_place_in_its_grammar() -> None:
    found, _ = in_worker_process(_GRAMMAR)
    assert found == [[10, 10, 0], None]


def test_a_request_that_goes_on_after_retraction_keeps_its_penalties() -> None:
    (same, plain, waits_for_more), _ = in_worker_process(_PENALTIES)  # type: ignore[misc]
    assert same == [True, True] and plain
    # One has its four tokens and may end, the other not yet.
    assert waits_for_more == [False, True]
