"""OpenAI chat completions (docs/protocol.md has our extensions).

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.gateway.chat_messages import ChatMessage, MessageImage, Tool
from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.openai import (
    ChunkStream,
    GenerationRequest,
    OpenAIDialect,
    envelope_of,
    logprob_entries,
    usage_of,
)
from tinkerscript.gateway.dialects.validation import (
    ONLY_TEXT,
    MaxTokens,
    TopLogprobs,
    Unsupported,
    convert,
    decode,
    function_tool,
    invalid,
    required_tools,
    unsupported,
    unsupported_content,
)
from tinkerscript.gateway.images import read_image
from tinkerscript.limits import IMAGES, MESSAGES, TOOLS
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.sampler import SampledTokens
from tinkerscript.tokenizer import LightTokenizer


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    # The `openai` client adds this.
    parsed_arguments: Any = None


class _ToolCall(Struct, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None


class _ImageURL(Struct, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"  # The processor decides the size.


class _ImagePart(Struct, forbid_unknown_fields=True):
    image_url: _ImageURL
    type: Literal["image_url"]


class _ToolFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _JsonSchema(Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    name: str
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _Request(GenerationRequest, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MESSAGES.limit)]
    tools: Annotated[list[_Tool], Meta(max_length=TOOLS.limit)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted and ignored.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    verbosity: Annotated[Any, Unsupported()] = None


_DECODER = msgspec.json.Decoder(_Request)


class _Chat(Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[_Tool] | None = None


_CHAT = msgspec.json.Decoder(_Chat)


def read_chat(data: bytes) -> tuple[list[ChatMessage], list[Tool]]:
    return _normalized_chat(decode(_CHAT, data), ONLY_TEXT)


def _normalized_chat(
    chat: _Chat | _Request, files: dict[str, bytes] | str
) -> tuple[list[ChatMessage], list[Tool]]:
    """`files` gets the images, or says why they are refused."""
    functions = [tool.function for tool in chat.tools or ()]
    tools = [function_tool(each.name, each.description, each.parameters) for each in functions]
    if not isinstance(files, str):
        contents = [message.content for message in chat.messages if isinstance(message.content, list)]
        IMAGES.check(sum(part.get("type") == "image_url" for content in contents for part in content))
    return [_normalized(message, index, files) for index, message in enumerate(chat.messages)], tools


def _required_tools(choice: str | dict[str, Any] | None, tools: list[Tool]) -> list[str]:
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return required_tools(None, tools)
    function: Any = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
    name: Any = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        remedy = "use 'auto', 'none', 'required', or {'type': 'function', 'function': {'name': NAME}}"
        raise unsupported("tool_choice", choice, remedy)
    return required_tools([name], tools)


def _json_schema(wanted: _ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema", "response_format of the type 'json_schema' needs one")
    return wanted.json_schema.schema_ or {"type": "object"}


def _top_logprobs(request: _Request) -> int:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
    return request.top_logprobs or 0


def _max_tokens(request: _Request) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"max_tokens={old} contradicts max_completion_tokens={new}")
    return old if new is None else new


def _normalized(message: _Message, index: int, files: dict[str, bytes] | str) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise invalid(f"messages[{index}].content", f"a message of the role {role!r} needs content")
    content, images = _content(message.content, index, files if role == "user" else ONLY_TEXT)
    normalized: ChatMessage = {"role": role, "content": content}
    if images:
        normalized["images"] = images
    if message.name:
        normalized["name"] = message.name
    if role == "assistant":
        _add_assistant_fields(normalized, message)
    elif message.tool_calls:
        raise invalid(f"messages[{index}].tool_calls", f"a message of the role {role!r} has no tool_calls")
    if role == "tool":
        if not message.tool_call_id:
            raise invalid(f"messages[{index}].tool_call_id", "a tool message needs a tool_call_id")
        normalized["tool_call_id"] = message.tool_call_id
    return normalized


def _add_assistant_fields(normalized: ChatMessage, message: _Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        normalized["reasoning_content"] = reasoning
    if message.tool_calls:
        normalized["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]


def _content(
    content: str | list[dict[str, Any]] | None, index: int, files: dict[str, bytes] | str
) -> tuple[str, list[MessageImage]]:
    if content is None or isinstance(content, str):
        return content or "", []
    whole, images = "", list[MessageImage]()
    for position, part in enumerate(content):
        where = f"messages[{index}].content[{position}]"
        if part.get("type") == "image_url":
            if isinstance(files, str):
                raise unsupported_content("image_url", where, files)
            url = convert(part, _ImagePart, where).image_url.url
            image, file = read_image(url, len(whole), where)
            images.append(image)
            files[image["sha256"]] = file
            continue
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise unsupported_content(part.get("type"), where)
        whole += text
    return whole, images


def _choice(tokenizer: LightTokenizer, call: ModelCall, index: int, choice: Choice) -> dict[str, Any]:
    message = choice.message
    if not message["content"] and message.get("tool_calls"):
        message = {**message, "content": None}
    written: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": _logprobs_of(tokenizer, call, choice),
        "finish_reason": choice.finish_reason,
    }
    if call.return_token_ids:
        written |= choice.token_fields()
    return written


def _logprobs_of(tokenizer: LightTokenizer, call: ModelCall, tokens: SampledTokens) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    return {"content": logprob_entries(tokenizer, call, tokens), "refusal": None}


class _ChatCompletionEvents(ChunkStream):
    def __init__(self, tokenizer: LightTokenizer, call: ModelCall, header: ReplyHeader) -> None:
        super().__init__(call, header, "chatcmpl", "chat.completion.chunk")
        self._tokenizer = tokenizer
        self._prompt = header.prompt

    def start(self) -> bytes:
        more: dict[str, Any] = {}
        if self._call.return_token_ids:
            more["prompt_token_ids"] = unpack_ids(self._prompt).tolist()
        opening = {"role": "assistant", "content": ""}
        first = self._chunk(0, opening, **more)
        return first + b"".join(self._chunk(index, opening) for index in range(1, self._call.n))

    def delta(self, delta: MessageDelta) -> bytes:
        texts = {"content": delta.content, "reasoning_content": delta.reasoning}
        written = {field: text for field, text in texts.items() if text}
        if not written and not (delta.sampled and (self._call.logprobs or self._call.return_token_ids)):
            return b""
        logprobs = _logprobs_of(self._tokenizer, self._call, delta)
        tokens = {"token_ids": unpack_ids(delta.sampled).tolist()} if self._call.return_token_ids else {}
        return self._chunk(delta.index, written, logprobs=logprobs, tokens=tokens)

    def _end(self, index: int, choice: Choice) -> bytes:
        calls: list[dict[str, Any]] = choice.message.get("tool_calls", [])
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        tool_calls = self._chunk(index, {"tool_calls": numbered}) if numbered else b""
        tokens = choice.constraint_field() if self._call.return_token_ids else {}
        return tool_calls + self._chunk(index, {}, finish_reason=choice.finish_reason, tokens=tokens)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        tokens: dict[str, list[int]] | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(tokens or {}),
        }
        return self._chunk_of(choice, **more)


class ChatCompletions(OpenAIDialect[ModelCall]):
    """OpenAI's `POST /chat/completions`."""

    path = "/v1/chat/completions"

    def parse(self, body: bytes) -> ModelCall:
        request = decode(_DECODER, body)
        files: dict[str, bytes] = {}
        messages, tools = _normalized_chat(request, files if self.no_images is None else self.no_images)
        return ModelCall(
            messages=messages,
            tools=tools,
            files=files,
            parse_tool_calls=bool(tools) and request.tool_choice != "none",
            max_tokens=_max_tokens(request),
            logprobs=bool(request.logprobs),
            top_logprobs=_top_logprobs(request),
            required_tools=_required_tools(request.tool_choice, tools),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            json_schema=_json_schema(request.response_format),
            template_kwargs=request.chat_template_kwargs or {},
            **request.shared_arguments(),
        )

    def reply(self, call: ModelCall, completion: Completion) -> dict[str, Any]:
        reply: dict[str, Any] = {
            **envelope_of(completion, "chatcmpl", "chat.completion"),
            "choices": [
                _choice(self.tokenizer, call, index, each) for index, each in enumerate(completion.choices)
            ],
            "usage": usage_of(call, completion),
        }
        if call.return_token_ids:
            reply["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
        return reply

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return _ChatCompletionEvents(self.tokenizer, call, header)
