"""A decode worker gives back what only prefill multiplies by, and cannot be given other weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_FREE = """
import json
from types import SimpleNamespace
import torch
from torch import nn
from sglang.srt.models import deepseek_v2
from tpla.core.errors import HookError
from tpla.workers.sglang_plugin.decode_weights import free_after_load
from tpla.workers.sglang_plugin.loaded_weights import refuse_update

HEADS, NOPE, VALUE, LATENT = {heads}, 8, 8, 32

class Attention(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.layer_id = layer_id
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.kv_b_proj.weight_scale = nn.Parameter(torch.ones(1))
        weight = self.kv_b_proj.weight.detach().unflatten(0, (HEADS, NOPE + VALUE))
        kc, vc = weight.split([NOPE, VALUE], 1)  # as SGLang makes them
        self.w_kc = kc.transpose(1, 2).contiguous().transpose(1, 2)
        self.w_vc = vc.contiguous().transpose(1, 2)
        self.w_scale = self.kv_b_proj.weight_scale

deepseek_v2.DeepseekV2AttentionMLA = Attention
model = nn.ModuleList([Attention(0), Attention(1)])
kept = [(each.w_kc.clone(), each.w_vc.clone()) for each in model]
assert free_after_load("loaded", SimpleNamespace(model=model)) == "loaded"
same = all(
    torch.equal(each.w_kc, kc) and torch.equal(each.w_vc, vc)
    for each, (kc, vc) in zip(model, kept)
)
left = sum(each.kv_b_proj.weight.nbytes for each in model)
scales = [float(each.w_scale) for each in model]
problem = ""
unabsorbed = Attention(1)
unabsorbed.w_kc = None
try:
    free_after_load(None, SimpleNamespace(model=unabsorbed))
except HookError as error:
    problem = str(error)
result = [same, left, scales, problem, refuse_update(None, None, "/other")]
print("RESULT" + json.dumps(result))
"""


@pytest.mark.parametrize("heads", [1, 4])
def test_the_projection_is_freed_and_what_was_made_of_it_stays(heads: int) -> None:
    code = _FREE.replace("{heads}", str(heads))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(each for each in done.stdout.splitlines() if each.startswith("RESULT"))
    same, left, scales, problem, refusal = json.loads(line.removeprefix("RESULT"))
    assert same and left == 0 and scales == [1.0, 1.0]
    assert "layer 1 has no absorbed weights" in problem
    assert refusal[0] is False and "start the workers anew" in refusal[1]
