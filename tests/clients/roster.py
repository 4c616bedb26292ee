"""The clients under test: which program plays each, by which API, what its library offers, how it is pointed.

What is not listed for a client its library does not offer, or leaves to another row.
"""

from __future__ import annotations

from dataclasses import dataclass

CONVERSATION = "conversation"
STREAMING = "streaming"
THINKING = "thinking"
BROKEN_CALL = "broken_call"
REQUIRED_TOOL = "required_tool"
STRUCTURED = "structured"
SAMPLES = "samples"
LOGPROBS = "logprobs"
PARALLEL = "parallel"
RETRY = "retry"
HANG_UP = "hang_up"
REFUSED = "refused"
SNIPPET = "snippet"

FEATURES = {
    CONVERSATION: "tools, several turns",
    STREAMING: "the same, streamed",
    THINKING: "reasoning shown and sent back",
    BROKEN_CALL: "malformed call",
    REQUIRED_TOOL: "required call",
    STRUCTURED: "JSON schema",
    SAMPLES: "n > 1",
    LOGPROBS: "logprobs",
    PARALLEL: "three at once",
    RETRY: "retry after 503",
    HANG_UP: "disconnect mid-stream",
}
"""The columns of the table."""

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
APIS = {CHAT: "chat completions", RESPONSES: "Responses", MESSAGES: "Messages"}

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
    snippet: str = ""
    """How it is pointed at an episode: code that finds an `episode` and leaves a `text`."""

    environ: tuple[str, str] = OPENAI
    """Names of the variables for the base URL and the key."""

    uses_project: bool = False
    """Whether the package is one of the project's own: it runs in `.venv`."""

    @property
    def key(self) -> str:
        """Names the row."""
        return f"{self.program}-{self.api}"

    @property
    def cases(self) -> tuple[str, ...]:
        return (*self.features, SNIPPET) if self.snippet else self.features


_LOOP = (CONVERSATION, STREAMING, BROKEN_CALL, RETRY)
_ASK = (REQUIRED_TOOL, STRUCTURED)

CLIENTS = [
    Client(
        "`openai`",
        "openai",
        CHAT,
        "openai_chat",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS, HANG_UP, REFUSED),
        """\
from openai import OpenAI

client = OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key)
messages = [{"role": "user", "content": "Name a color."}]
reply = client.chat.completions.create(model="policy", messages=messages)
text = reply.choices[0].message.content
""",
    ),
    Client("`openai`, async", "openai", CHAT, "openai_chat_async", (*_LOOP, PARALLEL, HANG_UP)),
    Client(
        "`openai`",
        "openai",
        RESPONSES,
        "openai_responses",
        (*_LOOP, *_ASK, LOGPROBS, HANG_UP, REFUSED),
        """\
from openai import OpenAI

client = OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key)
text = client.responses.create(model="policy", input="Name a color.").output_text
""",
    ),
    Client(
        "`openai`, async, `previous_response_id`",
        "openai",
        RESPONSES,
        "openai_responses_async",
        (CONVERSATION, STREAMING, BROKEN_CALL),
    ),
    Client(
        "`anthropic`",
        "anthropic",
        MESSAGES,
        "anthropic_messages",
        (*_LOOP, THINKING, *_ASK, HANG_UP, REFUSED),
        """\
from anthropic import Anthropic

client = Anthropic(base_url=episode.anthropic_base_url, api_key=episode.openai_api_key)
messages = [{"role": "user", "content": "Name a color."}]
reply = client.messages.create(model="policy", max_tokens=1000, messages=messages)
text = reply.content[0].text
""",
        environ=ANTHROPIC,
    ),
    Client(
        "`anthropic`, async, tool runner",
        "anthropic",
        MESSAGES,
        "anthropic_async",
        (CONVERSATION, STREAMING, PARALLEL),
        environ=ANTHROPIC,
    ),
    Client(
        "`litellm`",
        "litellm",
        CHAT,
        "litellm_chat",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS),
        """\
import litellm

where = {"api_base": episode.openai_base_url, "api_key": episode.openai_api_key}
messages = [{"role": "user", "content": "Name a color."}]
text = litellm.completion(model="openai/policy", messages=messages, **where).choices[0].message.content
""",
    ),
    Client(
        "LangChain `ChatOpenAI`",
        "langchain-openai",
        CHAT,
        "langchain_agent",
        (*_LOOP, *_ASK, SAMPLES, LOGPROBS),
        """\
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="policy", base_url=episode.openai_base_url, api_key=episode.openai_api_key)
text = model.invoke("Name a color.").text
""",
    ),
    Client("LangChain `ChatOpenAI`", "langchain-openai", RESPONSES, "langchain_agent", (*_LOOP, *_ASK)),
    Client(
        "`openai-agents`",
        "openai-agents",
        RESPONSES,
        "openai_agents",
        (*_LOOP, *_ASK, PARALLEL),
        """\
from agents import Agent, Runner, set_default_openai_client
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key)
set_default_openai_client(client, use_for_tracing=False)
text = Runner.run_sync(Agent(name="Painter", model="policy"), "Name a color.").final_output
""",
    ),
    Client("`openai-agents`", "openai-agents", CHAT, "openai_agents", (*_LOOP, *_ASK, PARALLEL)),
    Client(
        "`pydantic-ai`",
        "pydantic-ai-slim",
        CHAT,
        "pydantic_ai_agent",
        (*_LOOP, *_ASK, PARALLEL),
        """\
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=episode.openai_base_url, api_key=episode.openai_api_key)
text = Agent(OpenAIChatModel("policy", provider=provider)).run_sync("Name a color.").output
""",
    ),
    Client("`pydantic-ai`", "pydantic-ai-slim", RESPONSES, "pydantic_ai_agent", (*_LOOP, *_ASK)),
    Client(
        "`pydantic-ai`",
        "pydantic-ai-slim",
        MESSAGES,
        "pydantic_ai_agent",
        (*_LOOP, REQUIRED_TOOL),
        environ=ANTHROPIC,
    ),
    Client(
        "Inspect `openai-api`",
        "inspect_ai",
        CHAT,
        "inspect_task",
        (*_LOOP, REQUIRED_TOOL, SAMPLES, LOGPROBS),
        """\
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model

where = {"base_url": episode.openai_base_url, "api_key": episode.openai_api_key}
model = get_model("openai-api/tinkerscript/policy", **where)
log = eval(Task(dataset=[Sample("Name a color.")]), model=model, display="none")[0]
text = log.samples[0].output.completion
""",
        environ=("TINKERSCRIPT_BASE_URL", "TINKERSCRIPT_API_KEY"),
        uses_project=True,
    ),
    Client(
        "`verifiers`",
        "verifiers",
        CHAT,
        "verifiers_environment",
        (CONVERSATION, BROKEN_CALL, LOGPROBS, RETRY),
        """\
import os

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

os.environ["EPISODE_KEY"] = episode.openai_api_key
client = ClientConfig(api_base_url=episode.openai_base_url, api_key_var="EPISODE_KEY")
rows = Dataset.from_list([{"question": "Name a color.", "answer": "blue"}])
environment = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric())
options = {
    "model": "policy",
    "sampling_args": {"logprobs": True, "extra_body": {"return_token_ids": True}},
    "state_columns": ["trajectory"],  # With the ids and log probabilities of every step.
}
outputs = environment.generate_sync(environment.get_dataset(), client, **options)["outputs"]
text = outputs[0]["completion"][-1]["content"]
""",
    ),
]
