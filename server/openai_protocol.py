"""The requests of OpenAI's chat and completions API, with SGLang's extensions.

Every field that a client may send is listed here. What shapes a request or could harm a worker is
checked; the rest is passed on for SGLang to judge. ``tests/unit`` compares the tables with SGLang's
own models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from tpla.core.errors import BadRequest

Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Number = Annotated[float, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Strict(), Field(ge=-2, le=2)]
Name = Annotated[str, Strict(), StringConstraints(min_length=1, max_length=512)]
Bias = Annotated[float, Strict(), Field(ge=-100, le=100)]
TokenKey = Annotated[str, Strict(), StringConstraints(pattern=r"^[0-9]{1,9}$")]
StopString = Annotated[str, Strict(), StringConstraints(min_length=1)]

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""Checked up to the first bad item, the only one that is reported: an error for each of the million
that fit into a body took seconds, in which the router served nobody."""

MAX_STOP_STRINGS = 64
"""OpenAI allows 4, SGLang any number; each is searched for after every token."""

ROUTER_FIELDS = frozenset(
    {"bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank",
     "disagg_prefill_dp_rank", "routed_dp_rank"}
)  # fmt: skip
"""The router's or its workers' to choose, never a client's. SGLang trusts a data-parallel rank: one
out of range fails as a transfer, for which decode would be blamed."""

WITHOUT_EFFECT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "safety_identifier", "service_tier", "store",
     "verbosity"}
)  # fmt: skip
"""OpenAI's fields that SGLang does not know and that change nothing in an answer's validity."""

UNSUPPORTED = frozenset({"audio", "function_call", "functions", "web_search_options"})
"""OpenAI's fields that SGLang does not know and whose loss would change the answer."""

HARMFUL = {
    "stop_regex": "use stop",
    "lora_path": "serve a checkpoint that the adapter has been merged into",
}
"""SGLang's fields with which one request could hold a worker up for all others, or be answered
wrongly, and the remedy. Python's ``re`` may take time exponential in the text, and would run after
every token; workers refuse adapters, which decode would not apply."""

TEXTLESS_PARTS = frozenset({"audio_url", "file", "image_url", "input_audio", "video_url"})
"""Types of content parts that a model of text alone would never see: SGLang drops them silently."""

SET_FOR_TEMPLATES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation",
     "conversations", "max_length", "messages", "padding", "return_assistant_tokens_mask",
     "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools",
     "truncation"}
)  # fmt: skip
"""Arguments on the way to a chat template that are not its variables: SGLang or the tokenizer sets
them, and rendering fails where chat_template_kwargs does, too."""


class StreamOptions(BaseModel):
    """What a stream holds besides the text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None
    include_obfuscation: Bool | None = None


class ResponseFormat(BaseModel):
    """The grammar that an answer follows."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type != "json_schema":
            return self
        schema = self.json_schema
        bare = (self.model_extra or {}).get("schema")
        if schema is None and bare is None:
            raise ValueError("type json_schema needs json_schema: {name, schema}")
        if bare is not None and not isinstance(bare, dict):
            raise ValueError("schema must be an object")
        if schema is not None and not isinstance(schema.get("schema"), dict):
            raise ValueError("json_schema.schema must be an object")
        if schema is not None and not isinstance(schema.get("name"), str):
            raise ValueError("json_schema.name must be a string")
        return self


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Name
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionSpec


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "latest_reminder"]
    content: Text | Items[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if isinstance(self.content, list):
            if not self.content:
                raise ValueError("content must not be an empty array")
            for part in self.content:
                _check_part(part)
        return self


def _check_part(part: dict[str, Any]) -> None:
    if not isinstance(part.get("type"), str):
        raise ValueError("each content part needs a type, such as text")
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise ValueError("a content part of type text needs text")
    if part["type"] in TEXTLESS_PARTS:
        raise ValueError(f"the model reads text alone; leave parts of type {part['type']} out")


class _Request(BaseModel):
    """Fields that chat and completions share."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    n: Annotated[int, Strict(), Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Strict(), Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    seed: Int64 | None = None
    stop: StopString | Items[StopString] | None = None
    stream: Bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Text | None = None

    # SGLang's sampling extensions.
    top_k: Annotated[int, Strict(), Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Strict(), Field(ge=0, le=1)] | None = None
    min_tokens: Natural | None = None
    repetition_penalty: Annotated[float, Strict(), Field(ge=0.01, le=2)] | None = None
    """SGLang divides by it in float32, where a tinier one is 0: that ends the worker."""
    regex: Text | None = None
    ebnf: Text | None = None
    stop_token_ids: Items[Natural] | None = None
    no_stop_trim: Bool | None = None
    ignore_eos: Bool | None = None
    skip_special_tokens: Bool | None = None
    custom_logit_processor: Any = None
    custom_params: dict[str, Any] | None = None

    # SGLang's other extensions.
    rid: Name | None = None
    extra_key: Text | None = None
    cache_salt: Text | None = None
    priority: Annotated[int, Strict(), Field(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: Text | None = None
    session_params: dict[str, Any] | None = None
    images_config: dict[str, Any] | None = None
    return_hidden_states: Bool | None = None
    return_routed_experts: Bool | None = None
    routed_experts_start_len: Natural | None = None
    return_cached_tokens_details: Bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stop_strings(cls, value: object) -> object:
        # Not as a limit of the list's type: the message would be about the other branch, a string.
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} strings are allowed, not {len(value)}")
        return value

    @model_validator(mode="after")
    def _one_grammar(self) -> _Request:
        if self.regex is not None and self.ebnf is not None:
            raise ValueError("regex and ebnf exclude each other")
        return self

    @model_validator(mode="after")
    def _a_grammar_decides_when_to_end(self) -> _Request:
        if self.min_tokens and self._has_grammar():
            # SGLang's sampler would be left without a token, which ends the worker.
            raise ValueError(
                "min_tokens cannot be used with a grammar (regex, ebnf, json_schema, "
                "response_format or a tool_choice that demands a call): once the grammar has "
                "ended only the end token is left, which min_tokens forbids"
            )
        return self

    def _has_grammar(self) -> bool:
        """Whether the answer has to follow a grammar, and so ends where that does."""
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or self.regex is not None or self.ebnf is not None


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[int, Strict(), Field(ge=0, le=20)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: Bool | None = None
    reasoning_effort: Text | Number | None = None
    modalities: Items[Literal["text"]] | None = None

    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None

    reasoning: dict[str, Any] | None = None
    task: Text | None = None
    continue_final_message: Bool | None = None
    separate_reasoning: Bool | None = None
    stream_reasoning: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_dynamic_patch: Natural | None = None
    min_dynamic_patch: Natural | None = None
    use_audio_in_video: Bool | None = None
    input_ids: Annotated[Items[Natural], Field(min_length=1)] | None = None
    return_prompt_token_ids: Bool | None = None
    return_meta_info: Bool | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_variables_of_templates(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in SET_FOR_TEMPLATES & (value or {}).keys():
            raise ValueError(f"{name} is not a variable of chat templates; leave it out")
        return value

    @model_validator(mode="after")
    def _a_message_comes_before_the_one_that_goes_on(self) -> ChatRequest:
        alone = len(self.messages) == 1 and self.messages[0].role == "assistant"
        if self.continue_final_message and alone:
            raise ValueError("messages need another one before the one that is continued")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self

    def _has_grammar(self) -> bool:
        return super()._has_grammar() or self.tool_choice not in (None, "none", "auto")


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: Any
    best_of: Annotated[int, Strict(), Field(ge=1, le=128)] | None = None
    echo: Bool | None = None
    logprobs: Annotated[int, Strict(), Field(ge=0, le=5)] | None = None
    suffix: Text | None = None
    json_schema: Text | None = None
    custom_labels: dict[str, Text] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompt_has_a_known_shape(cls, value: object) -> object:
        split_prompts(value)
        return value

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported; use n")
        if self.echo and self.logprobs is not None:
            # Only prefill knows the logprobs of the prompt, and only decode answers.
            raise ValueError("echo with logprobs is not supported")
        if self.suffix:
            # SGLang ignores it unless started with --completion-template, which only workers know.
            raise ValueError(
                "suffix is not supported; write the model's fill-in-the-middle tokens in prompt"
            )
        return self

    def _has_grammar(self) -> bool:
        return super()._has_grammar() or self.json_schema is not None


R = TypeVar("R", bound=_Request)


def parse(model: type[R], body: dict[str, Any]) -> R:
    """Check a request whose null fields have been dropped (:func:`without_nulls`).

    Raises:
        BadRequest: a field is unknown, missing or malformed; ``param`` names it.
    """
    _refuse_what_cannot_be_done(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _bad_request(error, body) from None


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without its null fields, which mean "default" to OpenAI but not to SGLang."""
    return {name: value for name, value in body.items() if value is not None}


def split_prompts(prompt: object) -> list[str | list[int]]:
    """The single prompts in OpenAI's ``prompt``: one or a list, each text or token ids.

    Raises:
        ValueError: it is none of these, or one is empty.
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) and item for item in prompt):
            return list(prompt)
        if _is_tokens(prompt):
            return [prompt]
        if all(isinstance(item, list) and _is_tokens(item) for item in prompt):
            return list(prompt)
    raise ValueError(
        "prompt must be a non-empty string, array of strings, array of token ids (>= 0) or array "
        "of arrays of token ids"
    )


def _is_tokens(items: list[object]) -> bool:
    return bool(items) and all(type(item) is int and 0 <= item < 2**31 for item in items)


def _refuse_what_cannot_be_done(body: dict[str, Any]) -> None:
    for name in ROUTER_FIELDS & body.keys():
        raise BadRequest(
            f"{name} is not for clients to choose; leave it out.",
            param=name,
            code="invalid_parameter",
        )
    for name in (UNSUPPORTED | HARMFUL.keys()) & body.keys():
        usual = "use tools instead" if name.startswith("function") else "leave it out"
        remedy = HARMFUL.get(name, usual)
        raise BadRequest(
            f"{name} is not supported; {remedy}.", param=name, code="unsupported_parameter"
        )


def _bad_request(error: ValidationError, body: dict[str, Any]) -> BadRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"], body)
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        return BadRequest(message, param=param, code="unknown_parameter")
    if first["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
        return BadRequest(message, param=param, code="missing_required_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    if not param:
        # A rule about several fields; its message begins with the field at fault.
        return BadRequest(f"{problem}.", param=problem.split(" ")[0], code="invalid_value")
    return BadRequest(f"Invalid value for '{param}': {problem}.", param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...], body: object) -> str:
    """``loc`` as OpenAI writes it (``messages[0].content``), without pydantic's union branches."""
    path = ""
    for part in loc:
        if isinstance(body, dict) and isinstance(part, str):
            if part not in body and part != loc[-1]:
                continue
            path += f".{part}" if path else part
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path += f"[{part}]"
            body = body[part]
    return path
