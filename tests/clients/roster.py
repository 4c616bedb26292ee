"""The clients under test: which program plays each, by which API, and what its library offers.

What is not listed for a client its library does not offer, or leaves to another row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONVERSATION = "conversation"
STREAMING = "streaming"
BROKEN_CALL = "broken_call"
REQUIRED_TOOL = "required_tool"
STRUCTURED = "structured"
SAMPLES = "samples"
LOGPROBS = "logprobs"
PARALLEL = "parallel"
THINKING = "thinking"
RETRY = "retry"

FEATURES = {
    CONVERSATION: "three questions, reasoning, two tools, two calls at once; one sequence",
    STREAMING: "the same, streamed",
    THINKING: "the same with thinking shown and sent back",
    BROKEN_CALL: "a malformed tool call stays text and the conversation goes on",
    REQUIRED_TOOL: "`tool_choice` that demands a call",
    STRUCTURED: "an answer by a JSON schema",
    SAMPLES: "`n=3`",
    LOGPROBS: "log probabilities, compared with the sampler's",
    PARALLEL: "three equal requests at once",
    RETRY: "503, and asked again by the library",
}

OPENAI = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
ANTHROPIC = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")


@dataclass(frozen=True)
class Client:
    """A row of the table."""

    name: str
    package: str
    """The distribution whose version is told."""

    api: str
    program: str
    features: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environ: tuple[str, str] = OPENAI
    """Names of the variables for the base URL and the key."""

    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Features that the server refuses, with the field that its message names."""

    uses_project: bool = False
    """Whether the package is one of the project's own: it runs in `.venv`."""


_LOOP = (CONVERSATION, STREAMING, BROKEN_CALL, RETRY)
_ASK = (REQUIRED_TOOL, STRUCTURED)
_CHAT = "chat completions"
_REFUSED_CHAT = {REQUIRED_TOOL: "tool_choice", STRUCTURED: "response_format"}
_REFUSED_RESPONSES = {REQUIRED_TOOL: "tool_choice", STRUCTURED: "text.format"}

CLIENTS = [
    Client(
        "`openai`", "openai", _CHAT, "openai_chat",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS), refused=_REFUSED_CHAT,
    ),
    Client("`openai` (async)", "openai", _CHAT, "openai_chat_async", (*_LOOP, PARALLEL)),
    Client(
        "`openai`", "openai", "Responses", "openai_responses",
        (*_LOOP, *_ASK, LOGPROBS), refused=_REFUSED_RESPONSES,
    ),
    Client(
        "`openai` (async, `previous_response_id`)", "openai", "Responses", "openai_responses_async",
        (CONVERSATION, STREAMING, BROKEN_CALL),
    ),
    Client(
        "`anthropic`", "anthropic", "Messages", "anthropic_messages",
        (*_LOOP, THINKING, REQUIRED_TOOL), environ=ANTHROPIC, refused={REQUIRED_TOOL: "tool_choice"},
    ),
    Client(
        "`anthropic` (async, tool runner)", "anthropic", "Messages", "anthropic_async",
        (CONVERSATION, STREAMING), environ=ANTHROPIC,
    ),
    Client(
        "`litellm`", "litellm", _CHAT, "litellm_chat",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS), refused=_REFUSED_CHAT,
    ),
    Client(
        "LangChain `ChatOpenAI`", "langchain-openai", _CHAT, "langchain_agent",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS), refused=_REFUSED_CHAT,
    ),
    Client(
        "LangChain `ChatOpenAI`", "langchain-openai", "Responses", "langchain_agent",
        (*_LOOP, *_ASK), arguments=("responses",), refused=_REFUSED_RESPONSES,
    ),
    Client(
        "`openai-agents`", "openai-agents", _CHAT, "openai_agents",
        (*_LOOP, *_ASK), arguments=("chat",), refused=_REFUSED_CHAT,
    ),
    Client(
        "`openai-agents`", "openai-agents", "Responses", "openai_agents",
        (*_LOOP, *_ASK), refused=_REFUSED_RESPONSES,
    ),
    Client(
        "`pydantic-ai`", "pydantic-ai-slim", _CHAT, "pydantic_ai_agent",
        (*_LOOP, *_ASK), arguments=("chat",), refused=_REFUSED_CHAT,
    ),
    Client(
        "`pydantic-ai`", "pydantic-ai-slim", "Responses", "pydantic_ai_agent",
        (*_LOOP, *_ASK), arguments=("responses",), refused=_REFUSED_RESPONSES,
    ),
    Client(
        "`pydantic-ai`", "pydantic-ai-slim", "Messages", "pydantic_ai_agent",
        (*_LOOP, *_ASK), arguments=("anthropic",), environ=ANTHROPIC,
        refused={REQUIRED_TOOL: "tool_choice", STRUCTURED: "output_config"},
    ),
    Client(
        "Inspect `openai-api`", "inspect_ai", _CHAT, "inspect_task",
        (*_LOOP, REQUIRED_TOOL, SAMPLES, LOGPROBS), refused={REQUIRED_TOOL: "tool_choice"},
        environ=("TINKERSCRIPT_BASE_URL", "TINKERSCRIPT_API_KEY"), uses_project=True,
    ),
    Client(
        "`verifiers`", "verifiers", _CHAT, "verifiers_environment",
        (CONVERSATION, BROKEN_CALL, LOGPROBS, RETRY),
    ),
]  # fmt: skip
