"""The Inspect worker against a real HTTP server that speaks chat completions and records what it is asked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import zstandard
from aiohttp import web
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentText,
    GenerateConfig,
    ResponseSchema,
)
from inspect_ai.util import JSONSchema
from pydantic import JsonValue

from inspect_tinker_bridge import SandboxError, SelfGradingError, TaskFailedError, UnsupportedError
from inspect_tinker_bridge.conversion import ChatConverter, sampling_fields
from tinkerscript.client import Episode
from tinkerscript.config import WeightedTaskConfig
from tinkerscript.errors import (
    ClaimLostError,
    ConfigError,
    RequestRefusedError,
    ServerUnreachableError,
    WorkerError,
    WrongTaskError,
)
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.train.samples import TaskSamples
from tinkerscript.workers import base_task
from tinkerscript.workers.base_task import load_task
from tinkerscript.workers.chat_endpoint import ChatEndpoint, RetryPolicy
from tinkerscript.workers.worker import TaskRollout

TASKS = '''
from datetime import date
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import match, scorer, accuracy, Score
from inspect_ai.solver import generate, solver, system_message
from inspect_ai.tool import tool

SAMPLES = [Sample(input=f"Say {n}.", target=str(n), id=n, metadata={"n": n}) for n in range(1, 9)]

@task
def say():
    config = GenerateConfig(temperature=0.5, max_tokens=7, stop_seqs=["!"], seed=3)
    return Task(dataset=SAMPLES, solver=[system_message("Obey."), generate()], scorer=match(), config=config)

ODD = {"by": {1: "one"}, "pair": (1, 2), "some": {"b", "a"}, "day": date(2026, 1, 2), "raw": b"raw"}

@scorer(metrics=[accuracy()])
def by_turn(given):
    async def score(state, target):
        ids = [message.id for message in state.messages if message.role == "assistant"]
        found = {ids[-1]: 0.5} if given == "last" else given
        return Score(value=1.0, metadata={"call_rewards": found})
    return score

@solver
def two_turns():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Again."))
        return await generate(state)
    return solve

@task
def turns(given="last", more=None):
    scorers = [by_turn(given), *([by_turn(more)] if more else [])]
    return Task(dataset=SAMPLES, solver=two_turns(), scorer=scorers)

@scorer(metrics=[accuracy()])
def keeps_metadata():
    async def score(state, target) -> Score:
        return Score(value=float(state.metadata == ODD))
    return score

@task
def odd(first=1):
    samples = [Sample(input=f"Say {n}.", target=str(n), metadata=ODD) for n in range(first, first + 3)]
    return Task(dataset=samples, solver=generate(), scorer=keeps_metadata())


@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target) -> Score:
        raise ValueError("the scorer broke")
    return score

@task
def failing():
    return Task(dataset=SAMPLES, solver=generate(), scorer=broken())

@task
def short():
    return Task(dataset=SAMPLES, solver=react(), scorer=match(), message_limit=4)

@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)
    return execute

@scorer(metrics=[accuracy()])
def judged():
    async def score(state, target) -> Score:
        verdict = await get_model(role="judge").generate(f"Say {state.output.completion}0.")
        return Score(value=float(verdict.completion))
    return score

@task
def graded():
    return Task(dataset=SAMPLES, solver=[asked_first(), generate()], scorer=judged())

@solver
def asked_first():
    async def solve(state, generate):
        state.metadata["said"] = (await get_model(role="judge").generate("Say 1.")).completion
        return state
    return solve

@task
def reasons():
    config = GenerateConfig(reasoning_effort="high", cache=True, temperature=0.5)
    return Task(dataset=SAMPLES, solver=generate(verbosity="low"), scorer=match(), config=config)

@task
def boxed():
    return Task(dataset=[Sample(input="Say 1.", target="1", sandbox="no-such-provider")], scorer=match())

@task
def agent():
    return Task(dataset=SAMPLES, solver=react(tools=[add()]), scorer=match())
'''


class Server:
    """Replies in order; by default it says the number that the last message asks for."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.replies: list[web.Response] = []
        self.transcripts: list[tuple[str, bytes]] = []
        """Key and body of each."""

        self.transcript_replies: list[web.Response] = []
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers["Authorization"])
        if self.replies:
            return self.replies.pop(0)
        return said(body["messages"][-1]["content"].removeprefix("Say ").rstrip("."))

    async def record_transcript(self, request: web.Request) -> web.Response:
        self.transcripts.append((request.headers["Authorization"], await request.read()))
        if self.transcript_replies:
            return self.transcript_replies.pop(0)
        return web.json_response({"success": True, "failure_reason": ""})


def said(text: str | None, *calls: tuple[str, str, str], id: str = "chatcmpl-1") -> web.Response:
    tool_calls = [
        {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call, name, arguments in calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    if tool_calls:
        message["tool_calls"] = tool_calls
        choice["finish_reason"] = "tool_calls"
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    body = {"id": id, "object": "chat.completion", "model": "tiny", "choices": [choice], "usage": usage}
    return web.json_response(body)


def refused(status: int, code: str, message: str, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status, headers=headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/record_transcript", server.record_transcript)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"{site.name.rstrip('/').rsplit(':', 1)[0]}:{runner.addresses[0][1]}/v1"
    yield server
    await runner.cleanup()


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    return f"{tmp_path}/tasks.py"


def planned(task: str, number: int = 1, **args: JsonValue) -> dict[str, Any]:
    """The payload that the trainer makes, as it arrives."""
    samples = TaskSamples([WeightedTaskConfig(name=task, train_args=args, eval_args=args)], seed=1)
    found = [samples.payload_at(position) for position in range(10)]
    payload = next(each for each in found if str(each["sample"]["id"]) == str(number))
    return json.loads(msgspec.json.encode(payload))


def episode(
    server: Server, task: str, number: int = 1, *, payload: dict[str, Any] | None = None, **claimed: Any
) -> Episode:
    return Episode(
        episode_uuid=f"episode-{number}",
        attempt=1,
        payload=payload or ({} if task == "other" else planned(task, number)) | {"task": task},
        group_id="g",
        openai_base_url=server.url,
        openai_api_key=f"key-{number}",
        **{"episode_type": "train", **claimed},
    )


def rollout_of(*tasks: str, endpoint: ChatEndpoint | None = None) -> TaskRollout:
    return TaskRollout({name: load_task(name, {}) for name in tasks}, endpoint=endpoint)


async def played(server: Server, task: str, number: int = 4, **claimed: Any) -> WorkflowOutput:
    """The output of one episode."""
    async with rollout_of(task) as rollout:
        output = await rollout(episode(server, task, number, **claimed))
    assert isinstance(output, WorkflowOutput)
    return output


async def test_an_episode_is_asked_scored_and_described(server: Server, spec: str) -> None:
    output = await played(server, f"{spec}@say")
    assert output.reward == 1.0
    assert output.metadata == {
        "sample_id": 4,
        "scores": {"match": 1.0},
        "explanations": {"match": {"answer": "4", "explanation": "4"}},
        "answer": "4",
        "limit": None,
        "tool_errors": {},
    }
    assert output.log_metrics == {"score/match": 1.0, "model_calls": 1.0}
    assert server.keys == ["Bearer key-4"]
    assert server.requests == [
        {
            "model": "policy",
            "messages": [{"role": "system", "content": "Obey."}, {"role": "user", "content": "Say 4."}],
            "temperature": 0.5,
            "max_tokens": 7,
            "stop": ["!"],
            "seed": 3,
        }
    ]


def events(transcript: bytes) -> list[dict[str, Any]]:
    return json.loads(zstandard.ZstdDecompressor().decompress(transcript))["events"]


async def test_a_transcript_is_sent_under_the_claims_key_before_the_result(server: Server, spec: str) -> None:
    added = said(None, ("c1", "add", '{"a": 2, "b": 3}'))
    server.replies = [added, said(None, ("c2", "submit", '{"answer": "1"}'))]
    output = await played(server, f"{spec}@agent", 1, max_transcript_bytes=2**20)
    assert output.reward == 1.0
    ((key, body),) = server.transcripts
    assert key == "Bearer key-1"
    tools = [(e["function"], e["result"]) for e in events(body) if e["event"] == "tool"]
    assert tools == [("add", "5"), ("submit", "1")]


async def test_an_attempt_that_fails_leaves_its_transcript(server: Server, spec: str) -> None:
    with pytest.raises(TaskFailedError, match="the scorer broke"):
        await played(server, f"{spec}@failing", max_transcript_bytes=2**20)
    ((_, body),) = server.transcripts
    assert any(e["event"] == "error" and "the scorer broke" in e["error"]["message"] for e in events(body))


@pytest.mark.parametrize("limit", [0, 50])
async def test_a_server_that_takes_no_transcripts_gets_none(server: Server, spec: str, limit: int) -> None:
    output = await played(server, f"{spec}@say", max_transcript_bytes=limit)
    assert (output.reward, server.transcripts) == (1.0, [])


@pytest.mark.parametrize(
    "reply", [web.json_response({"failure_reason": "no"}, status=s) for s in (404, 409, 413, 500)]
)
async def test_a_transcript_that_is_refused_changes_nothing(
    server: Server, spec: str, monkeypatch: pytest.MonkeyPatch, reply: web.Response
) -> None:
    monkeypatch.setattr(base_task, "TRANSCRIPT_S", 0.5)
    server.transcript_replies = [reply]
    async with rollout_of(f"{spec}@say", endpoint=ChatEndpoint(sleep=AsyncMock())) as rollout:
        output = await rollout(episode(server, f"{spec}@say", 4, max_transcript_bytes=2**20))
    assert output.reward == 1.0


async def test_solver_and_scorer_reach_the_roles_of_the_claims_run(server: Server, spec: str) -> None:
    """Where the run has no judge, Inspect's rule holds: its default model, which no scorer may be given."""
    name = f"{spec}@graded"
    async with rollout_of(name) as rollout:
        judged = [episode(server, name, n, roles=("critic", "judge")) for n in (1, 2, 3)]
        alone = episode(server, name, 4, roles=("critic",))
        found = await asyncio.gather(*map(rollout, (*judged, alone)), return_exceptions=True)
    assert isinstance(found.pop(), SelfGradingError)
    outputs = [output for output in found if isinstance(output, WorkflowOutput)]
    assert sorted(output.reward for output in outputs) == [10.0, 20.0, 30.0]
    assert {output.log_metrics["model_calls"] for output in outputs} == {1.0}
    models = [(key[-1], request["model"]) for key, request in zip(server.keys, server.requests, strict=True)]
    for key in "123":
        assert [model for mine, model in models if mine == key] == ["judge", "policy", "judge"]


async def test_tool_calls_go_back_as_they_came(server: Server, spec: str) -> None:
    odd = '{"b":1,   "a": 2}'
    server.replies = [
        said("let me see ", ("call_1", "add", odd), id="chatcmpl-a"),
        said(None, ("call_2", "add", "{broken"), id="chatcmpl-b"),
        said(None, ("call_3", "submit", '{"answer": "3"}'), id="chatcmpl-c"),
    ]
    output = await played(server, f"{spec}@agent", 3)
    assert output.reward == 1.0
    assert output.log_metrics["model_calls"] == 3.0
    assert {tool["function"]["name"] for tool in server.requests[0]["tools"]} == {"add", "submit"}
    assert server.requests[0]["tool_choice"] == "auto"
    first, result = server.requests[1]["messages"][-2:]
    assert first["content"] == "let me see "
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": odd}
    assert result == {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    second, problem = server.requests[2]["messages"][-2:]
    assert second["tool_calls"][0]["function"]["arguments"] == "{broken"
    assert problem["content"].startswith("Error: ")
    assert output.metadata["tool_errors"] == {"parsing": 1}
    assert output.log_metrics["tool_error/parsing"] == 1.0


async def test_metadata_that_json_does_not_have_reaches_the_scorer(server: Server, spec: str) -> None:
    assert (await played(server, f"{spec}@odd", 2)).reward == 1.0


async def two_turns(server: Server, task: str, args: dict[str, JsonValue]) -> WorkflowOutput:
    server.replies = [said("1", id="chatcmpl-first"), said("2", id="chatcmpl-second")]
    async with TaskRollout({task: load_task(task, args)}) as rollout:
        output = await rollout(episode(server, task, payload=planned(task, **args)))
    assert isinstance(output, WorkflowOutput)
    return output


@pytest.mark.parametrize(
    ("args", "rewards"),
    [
        ({"given": "last"}, {"second": 0.5}),
        ({"given": "last", "more": [1.0, 2.0]}, {"first": 1.0, "second": 2.5}),
    ],
)
async def test_a_scores_metadata_rewards_single_calls(
    server: Server, spec: str, args: dict[str, JsonValue], rewards: dict[str, float]
) -> None:
    output = await two_turns(server, f"{spec}@turns", args)
    assert (output.reward, output.call_rewards) == (1.0, rewards)


@pytest.mark.parametrize(
    ("given", "problem"),
    [([1.0], "has 1 numbers, and the episode has 2 model calls"), ([0.0, "good"], "has 'good' for the call")],
)
async def test_rewards_of_calls_that_cannot_be_read_fail_the_episode(
    server: Server, spec: str, given: list[JsonValue], problem: str
) -> None:
    with pytest.raises(WorkerError, match=problem):
        await two_turns(server, f"{spec}@turns", {"given": given})


async def test_an_episode_of_other_arguments_is_refused_with_the_remedy(server: Server, spec: str) -> None:
    name = f"{spec}@odd"
    held_out = planned(name, 3, first=5)
    worker = TaskRollout({name: load_task(name, {})})
    knowing = TaskRollout({name: load_task(name, {})}, held_out={name: load_task(name, {"first": 5})})
    async with worker as rollout:
        with pytest.raises(WrongTaskError, match=r"sample '3'.*another problem.*--eval-args.*a seed where"):
            await rollout(episode(server, name, 3, payload=held_out, episode_type="eval"))
    async with knowing as rollout:
        evaluated = await rollout(episode(server, name, 3, payload=held_out, episode_type="eval"))
        trained = await rollout(episode(server, name, 3))
    assert [evaluated.reward, trained.reward] == [1.0, 1.0]
    assert [body["messages"][-1]["content"] for body in server.requests] == ["Say 7.", "Say 3."]


async def test_what_tunes_other_models_is_left_out_and_recorded(server: Server, spec: str) -> None:
    output = await played(server, f"{spec}@reasons")
    assert output.reward == 1.0
    assert output.metadata["unapplied"] == ["reasoning_effort='high'", "verbosity='low'"]
    (request,) = server.requests
    assert request.keys() == {"model", "messages", "temperature"}


async def test_a_tasks_sandbox_can_be_replaced_by_the_worker_alone(server: Server, spec: str) -> None:
    name = f"{spec}@boxed"
    claimed = episode(server, name)
    claimed.payload["sample"] |= {"sandbox": {"type": "local"}}  # type: ignore[operator]
    async with rollout_of(name) as rollout:
        with pytest.raises(SandboxError, match="no-such-provider"):
            await rollout(claimed)
    async with TaskRollout({name: load_task(name, {}, sandbox="local")}) as rollout:
        assert (await rollout(episode(server, name))).reward == 1.0
    with pytest.raises(ConfigError, match=r"no file .*/no/compose\.yaml"):
        load_task(name, {}, sandbox="docker:/no/compose.yaml")
    with pytest.raises(WorkerError, match="pip install inspect-k8s-sandbox"):
        async with TaskRollout({name: load_task(name, {}, sandbox="k8s")}):
            raise AssertionError("it began")


async def test_one_worker_runs_episodes_of_several_tasks_side_by_side(server: Server, spec: str) -> None:
    """One eval holds them all; what each task's own solver does stays its own."""
    tasks = [f"{spec}@say", f"{spec}@failing", f"{spec}@short"]
    async with rollout_of(*tasks) as rollout:
        say, short = (
            [rollout(episode(server, f"{spec}@{name}", number)) for number in range(1, 5)]
            for name in ("say", "short")
        )
        failing = rollout(episode(server, f"{spec}@failing"))
        outputs = await asyncio.gather(*say, *short, failing, return_exceptions=True)
    assert isinstance(outputs[-1], TaskFailedError)
    described = [output for output in outputs if not isinstance(output, BaseException)]
    assert [output.metadata["limit"] for output in described] == [None] * 4 + ["message"] * 4
    assert [output.reward for output in described[:4]] == [1.0] * 4
    assert described[4].log_metrics["limit/message"] == 1.0


async def test_an_episode_of_another_task_names_both(server: Server, spec: str) -> None:
    async with rollout_of(f"{spec}@say") as rollout:
        with pytest.raises(WrongTaskError, match=r"of the task 'other', this worker runs '.*@say'"):
            await rollout(episode(server, "other"))
        poisoned = episode(server, f"{spec}@say")
        del poisoned.payload["task"]
        with pytest.raises(WorkerError, match="names no task") as untold:
            await rollout(poisoned)
        broken = episode(server, f"{spec}@say")
        broken.payload["sample"] = {"target": "1"}
        with pytest.raises(WorkerError, match="has no id") as caught:
            await rollout(broken)
    for error in (caught.value, untold.value):
        assert not isinstance(error, WrongTaskError), "its own failure: another worker could not run it"


async def test_a_lost_claim_raises_at_once_and_the_worker_goes_on(server: Server, spec: str) -> None:
    server.replies = [refused(409, "claim_lost", "the lease expired")]
    async with rollout_of(f"{spec}@say") as rollout:
        with pytest.raises(ClaimLostError, match="the lease expired"):
            await rollout(episode(server, f"{spec}@say", max_transcript_bytes=2**20))
        assert server.transcripts == []
        assert (await rollout(episode(server, f"{spec}@say"))).reward == 1.0


async def test_another_refusal_raises_with_the_servers_words(server: Server, spec: str) -> None:
    server.replies = [refused(400, "context_length_exceeded", "the prompt has 5000 tokens")]
    with pytest.raises(RequestRefusedError, match="the prompt has 5000 tokens"):
        await played(server, f"{spec}@say")
    assert len(server.requests) == 1


async def asked(url: str, **policy: float) -> tuple[str, list[float]]:
    """What an endpoint answers, or the error, and how long it waited in between."""
    sleep = AsyncMock()
    endpoint = ChatEndpoint(sleep=sleep, retry=RetryPolicy(**policy))  # type: ignore[arg-type]
    try:
        reply = await endpoint.complete(url, "k", {"messages": [{"role": "user", "content": "Say 1."}]})
        answer = str(reply["choices"][0]["message"]["content"])
    except ServerUnreachableError as error:
        answer = str(error)
    await endpoint.aclose()
    return answer, [call.args[0] for call in sleep.await_args_list]


async def test_a_server_is_waited_for_as_long_as_it_says(server: Server, unused_tcp_port: int) -> None:
    again = [(503, {"Retry-After": "2"}), (429, {"Retry-After": "1"})]
    server.replies = [refused(status, "busy", "syncing", **header) for status, header in again]
    assert await asked(server.url) == ("1", [2.0, 1.0])
    server.replies = [refused(500, "x", "a worker died") for _ in range(4)]
    answer, waits = await asked(server.url, attempts=4, first_delay_s=1.0)
    assert re.search(r"4 attempts failed.*a worker died", answer)
    assert len(waits) == 3
    assert all(0.5 * 2**n <= seconds <= 1.5 * 2**n for n, seconds in enumerate(waits))
    answer, waits = await asked(f"http://127.0.0.1:{unused_tcp_port}/v1", attempts=2, max_away_s=60.0)
    assert "attempts failed" in answer
    assert 45 < sum(waits) <= 60, "a server that is restarted is not there for a while"


def test_what_is_asked_for_is_sent_or_refused_by_name() -> None:
    schema = ResponseSchema(name="answer", json_schema=JSONSchema(type="object"))
    headers = {"Accept-Encoding": "identity"}  # Those of a bridged agent's own connection.
    fields = sampling_fields(GenerateConfig(response_schema=schema, extra_headers=headers))
    assert fields.keys() == {"response_format"}
    assert fields["response_format"]["json_schema"]["schema"]["type"] == "object"
    with pytest.raises(UnsupportedError, match=r"extra_body, prompt_logprobs"):
        sampling_fields(GenerateConfig(extra_body={"a": 1}, prompt_logprobs=5, temperature=1.0))
    image = ContentImage(image="data:image/png;base64,AA==")
    with pytest.raises(UnsupportedError, match="image content"):
        ChatConverter().request([ChatMessageTool(content=[image])], [], "auto", GenerateConfig())


def test_a_users_images_are_sent_as_they_are() -> None:
    image = ContentImage(image="data:image/png;base64,AA==", detail="low")
    question = ChatMessageUser(content=[ContentText(text="What is "), image, ContentText(text="?")])
    (sent,) = ChatConverter().request([question], [], "auto", GenerateConfig())["messages"]
    assert sent == {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is "},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
            {"type": "text", "text": "?"},
        ],
    }
