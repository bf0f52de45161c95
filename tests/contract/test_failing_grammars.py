"""Grammars of llguidance that fail when they are used, with SGLang's own classes and the hooks."""

from __future__ import annotations

from tests.contract.test_sglang_hooks import in_worker_process

_GRAMMARS = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("deploy/reference_model")
backend = GuidanceBackend(tokenizer)
endless = backend.dispatch_json(json.dumps({"$ref": "#"}))
sound = backend.dispatch_json(json.dumps({"type": "boolean"}))

def masked(grammar):
    mask = grammar.allocate_vocab_mask(0, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask

def allowed(mask):
    return sum(bin(word & 0xFFFFFFFF).count("1") for word in mask[0].tolist())

few = allowed(masked(sound))
(wrong,) = tokenizer.encode("x", add_special_tokens=False)[:1]
try:
    sound.accept_token(wrong)
    refused = ""
except ValueError as error:
    refused = str(error)
every = bool((masked(sound) == -1).all())
try:
    sound.accept_token(wrong)
    still = False
except ValueError:
    still = True
reason = endless.error_message if isinstance(endless, InvalidGrammarObject) else ""
print("RESULT" + json.dumps([reason, few, bool(refused), every, still]))
"""


def test_a_grammar_without_a_first_mask_is_invalid_and_one_that_fails_later_refuses_its_token() -> (
    None
):
    result, _ = in_worker_process(_GRAMMARS)
    reason, allowed, refused, every_token, still_refused = result  # type: ignore[misc]
    assert reason and 0 < allowed < 100
    assert refused and every_token and still_refused
