"""The tables of accepted fields against SGLang's and OpenAI's own, and the merging of samples."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsBase as OpenAIChat,
)
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from tpla.core.errors import BadRequest
from tpla.router.legs import joined
from tpla.server.openai_protocol import (
    HARMFUL,
    MAX_STOP_STRINGS,
    ROUTER_FIELDS,
    SET_FOR_TEMPLATES,
    TEXTLESS_PARTS,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
)
from tpla.server.record import forwarded_headers, request_id_of
from tpla.server.samples import Sample, merge_usage, parse_chat, parse_completion

HI = [{"role": "user", "content": "hi"}]
LIMIT = 16
"""Samples that a request may ask for."""


def sglang_fields(class_name: str) -> set[str]:
    """Fields of a request model of SGLang, read from its source: importing it takes 20 s."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((root / "srt/entrypoints/openai/protocol.py").read_text())
    (found,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    return {
        item.target.id
        for item in found.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_of_sglang_is_known(model: type[Any]) -> None:
    theirs = sglang_fields(model.__name__.replace("ChatRequest", "ChatCompletionRequest"))
    assert len(theirs) > 40
    assert theirs - set(model.model_fields) - ROUTER_FIELDS - HARMFUL.keys() == set()


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_field_that_is_refused_is_sglangs_and_listed_once(model: type[Any]) -> None:
    theirs = sglang_fields(model.__name__.replace("ChatRequest", "ChatCompletionRequest"))
    refused = ROUTER_FIELDS | HARMFUL.keys()
    assert theirs >= refused
    assert refused & set(model.model_fields) == set()


@pytest.mark.parametrize(
    ("model", "theirs"), [(ChatRequest, OpenAIChat), (CompletionRequest, OpenAICompletion)]
)
def test_every_field_of_openai_is_known(model: type[Any], theirs: Any) -> None:
    names = set(theirs.__annotations__) | {"stream"}
    assert names - set(model.model_fields) - UNSUPPORTED == set()


def test_no_field_is_invented() -> None:
    chat = sglang_fields("ChatCompletionRequest") | set(OpenAIChat.__annotations__)
    # SGLang reads "reasoning" before it validates, so its model does not declare it.
    assert set(ChatRequest.model_fields) - chat == {"reasoning"}
    completion = sglang_fields("CompletionRequest") | set(OpenAICompletion.__annotations__)
    assert set(CompletionRequest.model_fields) - completion == set()


def test_fields_without_effect_are_those_that_sglang_does_not_have() -> None:
    assert WITHOUT_EFFECT & sglang_fields("ChatCompletionRequest") == set()
    assert set(ChatRequest.model_fields) >= WITHOUT_EFFECT


def body_of(sample: Sample) -> Any:
    return json.loads(joined(sample.body))


def test_samples_of_a_chat() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 3,
        "seed": 2**63 - 1,
        "rid": "mine",
        "store": True,
        "user": None,
    }
    request = parse_chat(body, LIMIT)
    bodies = [body_of(sample) for sample in request.samples]
    assert [body["seed"] for body in bodies] == [2**63 - 1, -(2**63), 1 - 2**63]
    assert all(set(body) == {"messages", "seed"} for body in bodies)
    assert request.samples[0].prompt == "user\nhi"


def test_conversations_that_begin_alike_have_keys_that_begin_alike() -> None:
    first = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    second = [*first, {"role": "user", "content": "more"}]
    keys = [parse_chat({"messages": list(m)}, LIMIT).samples[0].prompt for m in (first, second)]
    assert keys[1].startswith(keys[0])


def test_samples_of_many_prompts() -> None:
    request = parse_completion({"prompt": [[1, 2], [3]], "n": 2, "seed": 5, "best_of": 2}, LIMIT)
    bodies = [body_of(sample) for sample in request.samples]
    assert [(body["prompt"], body["seed"]) for body in bodies] == [
        ([1, 2], 5), ([1, 2], 6), ([3], 7), ([3], 8),
    ]  # fmt: skip
    assert all(set(body) == {"prompt", "seed"} for body in bodies)


@pytest.mark.parametrize(
    ("parse", "prompt"),
    [
        (parse_chat, {"messages": HI, "input_ids": [1, 2]}),
        (parse_chat, {"messages": HI, "tools": []}),
        (parse_completion, {"prompt": [[1, 2]], "custom_params": {"a": [3]}}),
    ],
)
def test_what_samples_share_is_written_once(parse: Any, prompt: dict[str, Any]) -> None:
    # 128 samples of a prompt of 4 MB took the router longer than a liveness probe waits.
    samples = parse({**prompt, "n": LIMIT, "seed": 0}, LIMIT).samples
    texts = {id(part): part for sample in samples for part in sample.body}
    assert len(texts) <= 2 + LIMIT
    assert [body_of(sample)["seed"] for sample in samples] == list(range(LIMIT))


@pytest.mark.parametrize("suffix", [None, ""])
def test_a_suffix_without_text_asks_for_nothing(suffix: str | None) -> None:
    assert len(parse_completion({"prompt": "x", "suffix": suffix}, LIMIT).samples) == 1


def test_usage_counts_a_prompt_once() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "reasoning_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert merge_usage([usage, usage, usage, None], 2) == {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "reasoning_tokens": 3,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_rule_about_two_fields_names_the_one_at_fault() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": "x", "regex": "a", "ebnf": "b"}, LIMIT)
    assert caught.value.param == "regex"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\nb", "ä"])
def test_unfit_request_ids_are_replaced(given: str) -> None:
    assert request_id_of({"x-request-id": given}).startswith("req-")


def test_only_well_formed_trace_headers_are_forwarded() -> None:
    assert "traceparent" not in forwarded_headers({"traceparent": "x\r\ny: z"}, "id")
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    forwarded = forwarded_headers({"traceparent": good, "tracestate": "ä"}, "id")
    assert forwarded["traceparent"] == good and "tracestate" not in forwarded


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "schema": 5}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}, "chat_template_kwargs"),
        (
            {
                "messages": [{"role": "assistant", "content": "a"}],
                "continue_final_message": True,
            },
            "messages",
        ),
    ],
)
def test_what_sglang_would_answer_with_an_error_of_its_own_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat({"messages": [{"role": "user", "content": "hi"}], **fields}, LIMIT)
    assert (caught.value.param or "").startswith(param)


def test_variables_of_templates_are_passed_on() -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False, "documents": []}}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert fields.items() <= body_of(parse_chat(body, LIMIT).samples[0]).items()


def test_arguments_that_are_no_variables_are_those_on_the_way_to_the_template() -> None:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
    # "messages" is what the conversation is called inside a template.
    assert (arguments | {"messages"}) - {"documents", "kwargs"} == SET_FOR_TEMPLATES


def refusal(parse: Any, **fields: Any) -> BadRequest:
    """Why a request is refused that has these fields, too."""
    usual = {"messages": HI} if parse is parse_chat else {"prompt": "hi"}
    with pytest.raises(BadRequest) as caught:
        parse({**usual, **fields}, LIMIT)
    return caught.value


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (parse_chat, {"regex": "a"}),
        (parse_chat, {"ebnf": 'root ::= "a"'}),
        (parse_chat, {"response_format": {"type": "json_object"}}),
        (parse_chat, {"response_format": {"type": "structural_tag"}}),
        (parse_chat, {"response_format": SCHEMA}),
        (parse_chat, {"tool_choice": "required"}),
        (parse_chat, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (parse_completion, {"regex": "a"}),
        (parse_completion, {"response_format": SCHEMA}),
        (parse_completion, {"json_schema": "{}"}),
    ],
)
def test_min_tokens_beyond_the_end_of_a_grammar_are_refused(
    parse: Any, fields: dict[str, Any]
) -> None:
    error = refusal(parse, min_tokens=1, **fields)
    assert error.param == "min_tokens"
    assert "only the end token is left" in error.message
    usual = {"messages": HI} if parse is parse_chat else {"prompt": "hi"}
    parse({**usual, **fields, "min_tokens": 0}, LIMIT)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_min_tokens_go_with_free_text(choice: str | None) -> None:
    text = {"response_format": {"type": "text"}, "tool_choice": choice}
    parse_chat({"messages": HI, "min_tokens": 5, **text}, LIMIT)


def test_a_repetition_penalty_that_is_zero_in_float32_is_refused() -> None:
    assert refusal(parse_chat, repetition_penalty=1e-300).param == "repetition_penalty"
    parse_chat({"messages": HI, "repetition_penalty": 0.01}, LIMIT)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_patterns_that_could_hold_a_worker_up_are_refused(parse: Any) -> None:
    error = refusal(parse, stop_regex="(a+)+$")
    assert (error.param, error.code) == ("stop_regex", "unsupported_parameter")
    assert error.message == "stop_regex is not supported; use stop."


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_an_adapter_that_decode_would_not_apply_is_refused(parse: Any) -> None:
    error = refusal(parse, lora_path="mine")
    assert (error.param, error.code) == ("lora_path", "unsupported_parameter")
    assert "merged into" in error.message


@pytest.mark.parametrize("name", sorted(ROUTER_FIELDS))
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a_client_may_not_choose_what_the_router_or_a_worker_does(parse: Any, name: str) -> None:
    assert refusal(parse, **{name: 0}).param == name


@pytest.mark.parametrize("kind", sorted(TEXTLESS_PARTS))
def test_content_that_the_model_cannot_read_is_refused(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    error = refusal(parse_chat, messages=[{"role": "user", "content": parts}])
    assert "the model reads text alone" in error.message and kind in error.message


def test_one_stop_string_too_many_is_told_the_limit() -> None:
    most = ["x"] * MAX_STOP_STRINGS
    parse_chat({"messages": HI, "stop": most}, LIMIT)
    error = refusal(parse_chat, stop=[*most, "x"])
    assert error.param == "stop"
    assert "at most 64 strings are allowed" in error.message
