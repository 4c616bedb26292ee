"""`AgentTask` is an Inspect task with a coding agent in place of the task's solver.

Each episode runs the agent in `/work` of a `bubblewrap` sandbox, with the sample's input as its prompt. Then
all processes end, each file in the metadata `tests` is restored or removed, and the scorers run in the
sandbox with a fresh home, without the agent's programs or the model. To add an agent, add its `CodingAgent`
to `AGENTS`.

Sources: the programs' help and documentation; Claude Code 2.1, Codex CLI 0.169, mini-swe-agent 2.4, opencode
1.18.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inspect_ai.dataset import Sample
from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from pydantic import JsonValue

from inspect_tinker_bridge import RunnerOptions, SandboxConfig
from inspect_tinker_bridge.episodes import current_policy
from inspect_tinker_bridge.sandbox import sandbox_files_of
from tinkerscript.errors import ClaimLostError, ConfigError, WorkerError
from tinkerscript.isolation.bubblewrap import DEFAULT_ENVIRONMENT, HOME, Bubblewrap
from tinkerscript.isolation.inspect_sandbox import BubblewrapSandbox
from tinkerscript.protocol import POLICY
from tinkerscript.workers.base_task import EpisodeModel
from tinkerscript.workers.inspect_task import GatewayPolicy, InspectTask
from tinkerscript.workers.model_relay import AgentRelay

PORT = 8000  # On the agent's loopback interface.
MAX_OUTPUT_BYTES = 4 * 2**20
OF_A_CLAIM = 0.9  # The rest is for scoring.
TESTS = "tests"


class AgentTask(InspectTask):
    def __init__(self, name: str, agent: str, time_limit_s: float, /, **args: Any) -> None:
        super().__init__(name, **args)
        program = agent_named(agent)
        installation_of(program)
        for sample in self.info.samples:
            _tests_of(sample)
        self.options = RunnerOptions(
            sandbox=SandboxConfig("bubblewrap"), solver=agent_solver(program, time_limit_s)
        )


@solver
def agent_solver(agent: CodingAgent, time_limit_s: float) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        policy = current_policy()
        assert isinstance(policy, GatewayPolicy)
        place = sandbox().as_type(BubblewrapSandbox)
        claim = policy.model.claim
        limit_s = min(
            time_limit_s, OF_A_CLAIM * claim.max_claim_s if claim and claim.max_claim_s else time_limit_s
        )
        try:
            run = await run_agent(
                agent, state.input_text, sandbox=place.bubblewrap, model=policy.model, limit_s=limit_s
            )
        except ClaimLostError as error:
            policy.lost = error
            raise
        policy.calls += run.calls
        _record(agent, run)
        await place.bubblewrap.start()
        await _restore(policy.sample, place)
        state.output = ModelOutput.from_content(str(state.model), run.answer)
        state.messages.append(state.output.message)
        return state

    return solve


def _record(agent: CodingAgent, run: AgentRun) -> None:
    # This becomes the episode's transcript.
    found: dict[str, JsonValue] = {
        "exit_code": run.exit_code,
        "model_calls": run.calls,
        "refused": dict(run.refusals),
        "output": run.output,
        "errors": run.complaints,
    }
    transcript().info(found, source=agent.program)


async def _restore(sample: Sample, place: BubblewrapSandbox) -> None:
    tests = _tests_of(sample)
    files = await sandbox_files_of(sample)
    for name in tests:
        # The agent may have put a link or a folder in its place.
        await place.exec(["rm", "-rf", "--", name])
        if name in files:
            await place.write_file(name, files[name])


def _tests_of(sample: Sample) -> list[str]:
    tests: Any = (sample.metadata or {}).get(TESTS, [])
    if not isinstance(tests, list) or not all(isinstance(name, str) for name in tests):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"the sample {sample.id!r}: metadata {TESTS!r} must list the paths of test files")
    return tests  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True)
class AgentRun:
    answer: str
    output: str
    complaints: str
    exit_code: int | None  # None after the time limit.
    calls: int
    refusals: dict[str, int]  # By `STATUS METHOD PATH`.


async def run_agent(
    agent: CodingAgent, prompt: str, *, sandbox: Bubblewrap, model: EpisodeModel, limit_s: float
) -> AgentRun:
    """Raises WorkerError for an agent that is not installed, made no model call, or ended with a refused
    call.

    Also raises ClaimLostError and IsolationError.
    """
    if len(prompt.encode()) > MAX_PROMPT_BYTES:
        raise WorkerError(
            f"the sample's input has {len(prompt.encode()):,} bytes; agents take {MAX_PROMPT_BYTES:,}"
        )
    installation = installation_of(agent)
    relay = AgentRelay(model)
    await sandbox.start(readable=installation.folders)
    try:
        job = AgentJob(prompt, f"http://127.0.0.1:{PORT}/agent", await relay.context_length())
        async with relay.listening(await sandbox.listen(PORT)):
            await asyncio.to_thread(_write_home, sandbox, agent, job)
            command = sandbox.command(
                [str(installation.program), *agent.arguments(job)],
                environment={"PATH": installation.path, **agent.environment(job)},
            )
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                exit_code = await _run(command, sandbox, limit_s, output, errors)
                said, complaints = _end_of(output), _end_of(errors)
    finally:
        await sandbox.stop()
    if relay.lost is not None:
        raise relay.lost
    if relay.refused:
        raise WorkerError(f"the gateway does not support what {agent.program} asks for: {relay.last_refusal}")
    if not relay.answered:
        reason = relay.last_refusal or complaints[-1000:] or said[-1000:] or "it said nothing"
        raise WorkerError(f"{agent.program} made no model call (exit status {exit_code}): {reason}")
    return AgentRun(agent.answer(said), said, complaints, exit_code, relay.answered, dict(relay.refusals))


def _write_home(sandbox: Bubblewrap, agent: CodingAgent, job: AgentJob) -> None:
    # The agent has not run yet, so no links are in the way.
    for name, text in agent.home_files(job).items():
        path = Path(f"{sandbox.root}{HOME}") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def _run(
    command: list[str], sandbox: Bubblewrap, limit_s: float, output: IO[bytes], errors: IO[bytes]
) -> int | None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env={}
    )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        await sandbox.stop()
        await process.wait()


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")


SIDE = "side"  # Marks an agent's side calls (the gateway's agent mode).
MAX_PROMPT_BYTES = 120_000  # Linux limits the length of an argument.
PLACEHOLDER_KEY = "the-sandbox-holds-no-key"


@dataclass(frozen=True)
class AgentJob:
    prompt: str
    url: str  # The gateway's agent mode, without `/v1`.
    context_tokens: int

    @property
    def reply_tokens(self) -> int:
        return min(32_000, self.context_tokens // 4)


@dataclass(frozen=True)
class CodingAgent:
    program: str
    arguments: Callable[[AgentJob], list[str]]  # After the program's name.
    environment: Callable[[AgentJob], dict[str, str]]
    home_files: Callable[[AgentJob], Mapping[str, str]] = lambda job: {}
    answer: Callable[[str], str] = lambda output: ""  # Finds the final answer in the output.


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
        # Tools loaded later come as references, which only Anthropic's models know.
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
    "mini-swe-agent": CodingAgent(  # Its output ends without an answer.
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


def agent_named(name: str) -> CodingAgent:
    if name not in AGENTS:
        raise WorkerError(f"there is no agent {name!r}; there are {', '.join(AGENTS)}")
    return AGENTS[name]


@dataclass(frozen=True)
class Installation:
    program: Path
    folders: tuple[Path, ...]  # Its own and its interpreter's.
    path: str


def installation_of(agent: CodingAgent) -> Installation:
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
