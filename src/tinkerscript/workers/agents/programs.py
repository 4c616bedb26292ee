"""The agents that a worker can run: what each is started with, and what it is told of the model.

An agent is a program that its user installs; it is found on the PATH. To add one, write its `CodingAgent` and
enter it in `AGENTS`.

Sources: the programs' own help and documentation; Claude Code 2.1, Codex CLI 0.169, mini-swe-agent 2.4,
opencode 1.18.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerscript.errors import WorkerError
from tinkerscript.isolation.bubblewrap import DEFAULT_ENVIRONMENT, HOME
from tinkerscript.protocol import POLICY

SIDE = "side"
"""The name under which an agent's side calls are marked (the gateway's agent mode)."""

MAX_PROMPT_BYTES = 120_000
"""Linux takes no longer argument."""

PLACEHOLDER_KEY = "the-sandbox-holds-no-key"
"""What agents send as their key."""


@dataclass(frozen=True)
class AgentJob:
    """What an agent is to do, and the model to do it with."""

    prompt: str
    url: str
    """Of the gateway's agent mode, without `/v1`."""

    context_tokens: int

    @property
    def reply_tokens(self) -> int:
        """How many of them an agent should leave to a reply."""
        return min(32_000, self.context_tokens // 4)


@dataclass(frozen=True)
class CodingAgent:
    """One program."""

    program: str
    """What it is called on the PATH."""

    arguments: Callable[[AgentJob], list[str]]
    """What follows the program's name."""

    environment: Callable[[AgentJob], dict[str, str]]
    """Its variables, besides those of the sandbox."""

    home_files: Callable[[AgentJob], Mapping[str, str]] = lambda job: {}
    """Files of its home folder by their path in it."""

    answer: Callable[[str], str] = lambda output: ""
    """The agent's last words, from what it printed; empty if it had none."""


def _claude_environment(job: AgentJob) -> dict[str, str]:
    main = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    side = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return {
        **dict.fromkeys((*main, "CLAUDE_CODE_SUBAGENT_MODEL"), POLICY),
        **dict.fromkeys(side, SIDE),
        "ANTHROPIC_BASE_URL": job.url,
        "ANTHROPIC_AUTH_TOKEN": PLACEHOLDER_KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(job.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(job.reply_tokens),
        # Tools that are loaded later come as references, which no model but Anthropic's knows.
        "ENABLE_TOOL_SEARCH": "false",
        "IS_SANDBOX": "1",
    }


def _codex_config(job: AgentJob) -> Mapping[str, str]:
    text = f"""\
model = "{POLICY}"
model_provider = "tinkerscript"
model_context_window = {job.context_tokens}
model_auto_compact_token_limit = {job.context_tokens - job.reply_tokens}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tinkerscript]
name = "tinkerscript"
base_url = "{job.url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": text}


def _codex_answer(output: str) -> str:
    items = (line["item"] for line in _json_lines(output) if line.get("type") == "item.completed")
    return _last(item.get("text") for item in items if item.get("type") == "agent_message")


def _opencode_config(job: AgentJob) -> Mapping[str, str]:
    limit = {"limit": {"context": job.context_tokens, "output": job.reply_tokens}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{job.url}/v1", "apiKey": PLACEHOLDER_KEY},
        "models": {POLICY: limit, SIDE: limit},
    }
    config = {
        "model": f"tinkerscript/{POLICY}",
        "small_model": f"tinkerscript/{SIDE}",
        "provider": {"tinkerscript": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


AGENTS: Mapping[str, CodingAgent] = {
    "claude-code": CodingAgent(
        "claude",
        lambda job: [
            *("--print", "--dangerously-skip-permissions"),
            *("--output-format", "stream-json", "--verbose", "--", job.prompt),
        ],
        _claude_environment,
        answer=lambda output: _last(
            line.get("result") for line in _json_lines(output) if line.get("type") == "result"
        ),
    ),
    "codex": CodingAgent(
        "codex",
        lambda job: [
            *("exec", "--json", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "--", job.prompt),
        ],
        lambda job: {"OPENAI_API_KEY": PLACEHOLDER_KEY},
        _codex_config,
        _codex_answer,
    ),
    "mini-swe-agent": CodingAgent(  # It ends with the output of a command, and no words of its own.
        "mini",
        lambda job: [
            *("--yolo", "--exit-immediately", "--model", f"openai/{POLICY}"),
            *("--task", job.prompt, "--output", f"{HOME}/trajectory.json"),
        ],
        lambda job: {
            "OPENAI_API_BASE": f"{job.url}/v1",
            "OPENAI_API_KEY": PLACEHOLDER_KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    "opencode": CodingAgent(
        "opencode",
        lambda job: ["run", "--format", "json", "--", job.prompt],
        lambda job: {
            f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
        },
        _opencode_config,
        lambda output: _last(
            line["part"].get("text") for line in _json_lines(output) if line.get("type") == "text"
        ),
    ),
}
"""What `tinkerscript worker --agent` takes."""


def agent_named(name: str) -> CodingAgent:
    """Raises WorkerError for an agent that is not in the table."""
    if name not in AGENTS:
        raise WorkerError(f"there is no agent {name!r}; there are {', '.join(AGENTS)}")
    return AGENTS[name]


@dataclass(frozen=True)
class Installation:
    """Where a program is on this machine."""

    program: Path
    folders: tuple[Path, ...]
    """What it needs to run: its own folder, and that of its interpreter."""

    path: str
    """PATH for it."""


def installation_of(agent: CodingAgent) -> Installation:
    """Raises WorkerError if the agent's program is not on the PATH."""
    found = shutil.which(agent.program)
    if found is None:
        raise WorkerError(f"{agent.program!r} is not on the PATH; docs/agents.md shows how to install it")
    program = Path(found).absolute()
    interpreters = [Path(each) for each in (shutil.which("node"), program.parent / "python") if each]
    programs = [program, *(each for each in interpreters if each.exists())]
    folders = dict.fromkeys(
        folder for each in programs for folder in (each.parent.parent, each.resolve().parent.parent)
    )
    bins = dict.fromkeys(str(each.parent) for each in programs)
    mounted = tuple(_outermost(folders))
    shown = next((folder for folder in mounted if Path.home().is_relative_to(folder)), None)
    if shown is not None:
        raise WorkerError(
            f"{program} is installed in {shown}, which the sandbox would show whole; install it into a "
            "folder of its own"
        )
    return Installation(program, mounted, ":".join([*bins, DEFAULT_ENVIRONMENT["PATH"]]))


def _outermost(folders: Iterable[Path]) -> Iterator[Path]:
    """The folders that are in none of the others, nor in the system's."""
    known = list(folders)
    for folder in known:
        inside = any(folder != other and folder.is_relative_to(other) for other in known)
        if not inside and not folder.is_relative_to("/usr"):
            yield folder


def _json_lines(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # Programs print warnings between their events.
        if isinstance(value, dict):
            yield value


def _last(texts: Iterable[Any]) -> str:
    said = [text for text in texts if isinstance(text, str)]
    return said[-1] if said else ""
