"""What a worker accepts, SGLang's own admission takes: else a queue would wait for ever."""

from __future__ import annotations

import pytest

from tests.contract.test_sglang_hooks import WORKER, in_worker_process

_LIMITS = """
import json
from types import SimpleNamespace as Names
from unittest.mock import MagicMock
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from tpla.core.config import Role
from tpla.core.errors import ConfigError
from tpla.workers.sglang_plugin.longest_request import limit_to_pool

PAGE, POOL = 64, 1280
allocator = Names(page_size=PAGE, available_size=lambda: POOL)

def limits(role, context=1 << 20, reserved=512):
    longest = min(POOL, context) - 1
    scheduler = Names(page_size=PAGE, max_total_num_tokens=POOL, max_req_len=longest,
                      max_req_input_len=longest - 5,
                      server_args=Names(num_reserved_decode_tokens=reserved))
    limit_to_pool(role, scheduler)
    return scheduler
"""

_PREFILL = """
from sglang.srt.managers import schedule_policy as module

module.is_dsa_prefill_cp_in_seq_split = lambda: False
module.is_prefill_context_parallel_enabled = lambda: False

def begins(tokens):
    tree = MagicMock(disable=False)
    tree.evictable_size.return_value = 0
    tree.supports_mamba.return_value = False
    adder = module.PrefillAdder(PAGE, tree, allocator, None, 1.0, POOL, None)
    request = MagicMock(sampling_params=Names(max_new_tokens=1, ignore_eos=False), output_ids=[],
                        full_untruncated_fill_ids=range(tokens), prefix_indices=[],
                        host_hit_length=0, extend_range=Names(length=tokens))
    request.needs_host_load_back.return_value = False
    adder.add_one_req(request, False, None)
    return request in adder.can_run_list

refused_from = limits(Role.PREFILL).max_req_input_len
found = [begins(refused_from - 1), begins(refused_from)]
print("RESULT" + json.dumps([*found, limits(Role.PREFILL, context=256).max_req_input_len]))
"""

_DECODE = """
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest

def request(prompt, answer, limit):
    sampling = Names(max_new_tokens=limit)
    return MagicMock(origin_input_ids=range(prompt), output_ids=range(answer), req_pool_idx=0,
                     finished_reason=None, pd_rebootstrap_in_progress=False,
                     sampling_params=sampling)

def queue(**queues):
    made = object.__new__(DecodePreallocQueue)
    idle = Names(reqs=[])
    scheduler = Names(running_batch=idle, last_batch=None, waiting_queue=[], enable_hisparse=False,
                      enable_decode_hicache=False, enable_priority_scheduling=False,
                      server_args=Names(disaggregation_decode_enable_radix_cache=False,
                                        disable_radix_cache=False))
    vars(made).update(queue=[], retracted_queue=[], pending_reqs=[], kv_manager=MagicMock(),
                      scheduler=scheduler, token_to_kv_pool_allocator=allocator,
                      token_to_kv_pool=None, num_reserved_decode_tokens=512,
                      transfer_queue=MagicMock(queue=[], enable_staging=False),
                      req_to_token_pool=MagicMock(req_to_token=torch.zeros(1, POOL)),
                      req_to_metadata_buffer_idx_allocator=MagicMock())
    made.kv_manager.kv_args.state_types = []
    for name in ("req_to_token_pool", "req_to_metadata_buffer_idx_allocator"):
        getattr(made, name).available_size.return_value = 1
    made._pre_alloc = lambda *args: None
    vars(made).update(queues)
    return made

def begins(prompt, answer):
    waiting = DecodeRequest(request(prompt, 0, answer), MagicMock(), waiting_for_input=True)
    return bool(queue(queue=[waiting]).pop_preallocated()[0])

def resumes(prompt, answer):
    return bool(queue(retracted_queue=[request(prompt, answer, answer)]).resume_retracted_reqs())

scheduler = limits(Role.DECODE)
refused_from, longest = scheduler.max_req_input_len, scheduler.max_req_len
prompt = refused_from - 1
rest = longest - prompt - 1
found = [begins(prompt, rest), resumes(prompt, rest), resumes(100, longest - 100)]
found += [begins(longest + 1, 1), resumes(100, longest + 2 - 100)]
try:
    limits(Role.DECODE, reserved=POOL - PAGE // 2)
    refused = ""
except ConfigError as error:
    refused = str(error)
print("RESULT" + json.dumps([found, limits(Role.DECODE, context=256).max_req_len, refused]))
"""


def test_the_longest_prompt_that_prefill_accepts_is_begun_and_the_next_one_never_would() -> None:
    found, _ = in_worker_process(_LIMITS + _PREFILL, worker={**WORKER, "role": "prefill"})
    assert found == [True, False, 256 - 1 - 5]


def test_the_longest_request_that_decode_accepts_is_begun_and_resumed() -> None:
    found, _ = in_worker_process(_LIMITS + _DECODE)
    (*fits, too_long, cannot_resume), of_the_context, refused = found  # type: ignore[misc]
    assert fits == [True, True, True]
    assert not too_long and not cannot_resume
    assert of_the_context == 256 - 1
    assert "--num-reserved-decode-tokens" in refused and "--max-total-tokens" in refused


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_limits_its_requests_before_its_pool_is_attached(role: str) -> None:
    script = """
from tpla.core.config import worker_config_from_environment
from tpla.workers.sglang_plugin.transfer_backend import attach_pool
scheduler = Names(page_size=PAGE, max_total_num_tokens=POOL, max_req_len=POOL - 1,
                  max_req_input_len=POOL - 6, server_args=Names(num_reserved_decode_tokens=512))
seen = []
manager = Names(attach=lambda *args: seen.append(scheduler.max_req_input_len))
attach_pool(worker_config_from_environment(), manager,
            Names(token_to_kv_pool=None, scheduler=scheduler))
print("RESULT" + json.dumps(seen))
"""
    found, _ = in_worker_process(_LIMITS + script, worker={**WORKER, "role": role})
    assert found == [{"prefill": 1280 - 64 - 1, "decode": 1280 - 512 - 4}[role]]
