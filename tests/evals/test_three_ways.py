"""One task, three ways to run it: plain Inspect, the bridge, and a worker. All mean the same.

Every task of inspect_evals that loads without a network is found and run with the same replies. What the
model is asked, with which settings, and what the scorers say, has to be equal. A task whose data is on the
network gets a stand-in sample in the place of its data. A third of the tasks runs in `make acceptance`, the
rest in `make acceptance LONG=1`.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import huggingface_hub.constants
import pytest
from inspect_ai import Epochs, eval_async
from inspect_ai.dataset import Dataset, MemoryDataset, Sample
from inspect_ai.log import read_eval_log_async
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.model._providers.mockllm import MockLLM
from inspect_ai.tool import ToolChoice, ToolInfo
from tinker_cookbook.rl.rollout_runner import run_rollout

from bridge_parts import END, Says, bytes_renderer
from inspect_tinker_bridge import (
    BridgeError,
    InspectTaskInfo,
    SelfGradingError,
    load_environment,
    load_inspect_task,
)
from inspect_tinker_bridge._inspect_private import ProcessState, registered_names, silent_display
from inspect_tinker_bridge.conversion import ChatConverter, sampling_fields, unapplied
from inspect_tinker_bridge.env import InspectEnv
from tinkerscript.errors import TinkerScriptError
from tinkerscript.workers.base_task import EpisodeModel
from tinkerscript.workers.chat_endpoint import ChatEndpoint
from tinkerscript.workers.inspect_task import InspectTask

pytestmark = [pytest.mark.timeout(300)]

NAMES = [name for name in registered_names() if name.startswith("inspect_evals/")]
SAID = "I think so.\nANSWER: A"
MAX_CALLS = 3
"""After these calls the model cannot be reached, in each of the ways: agents end with an error."""

FLOOR = 0.2
"""The share of the tasks that is compared at least. The others have data or packages that are not here."""

REFUSED = "graded by the policy, which both refuse"

STAND_IN = {
    "question": "What is 6 times 7?",
    "choices": ["42", "41", "40", "39"],
}
OUTCOMES: Counter[str] = Counter()
"""What became of the tasks: `ran`, or why one was skipped."""

Ask = tuple[list[dict[str, Any]], list[str], dict[str, Any], list[str]]
"""Messages, tools, request fields, and what is left out."""


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    """No name is looked up, so that what needs a network fails at once."""
    with pytest.MonkeyPatch.context() as patch:

        def refuse(host: Any, *_: Any, **__: Any) -> Any:
            raise OSError(f"no network: {host}")

        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(time, "sleep", lambda _: None)  # Downloads try again after seconds.
        yield


def stand_in(*_: Any, **__: Any) -> Dataset:
    sample = Sample(input=STAND_IN["question"], choices=STAND_IN["choices"], target="A", id="stand-in")
    return MemoryDataset([sample])


def loaded(name: str, patch: pytest.MonkeyPatch) -> InspectTaskInfo:
    """The task with its data, or with a stand-in. Skips the test, with the reason, if neither can be had."""
    try:
        return load_inspect_task(name)
    except Exception:  # noqa: BLE001 (whatever a package raises without its data)
        for module in [module for key, module in sys.modules.items() if key.startswith("inspect_evals")]:
            for function in ("hf_dataset", "json_dataset", "csv_dataset", "load_json_dataset"):
                if hasattr(module, function):
                    patch.setattr(module, function, stand_in)
    try:
        return load_inspect_task(name)
    except Exception as error:  # noqa: BLE001
        skip(f"does not load: {type(error).__name__}")


def skip(reason: str) -> Any:
    OUTCOMES[reason] += 1
    pytest.skip(reason)


def asked(
    messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig
) -> Ask:
    body = ChatConverter().request(messages, tools, choice, GenerateConfig())
    return body["messages"], [tool.name for tool in tools], sampling_fields(config), unapplied(config)


def reply() -> ModelOutput:
    output = ModelOutput.from_content("policy", SAID)
    output.usage = ModelUsage(total_tokens=2)
    return output


def numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    marks = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
    found: dict[str, float] = {}
    for name, score in scores.items():
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        for key, value in cast("dict[str, Any]", values).items():
            found[f"{name}{'/' * bool(key)}{key}"] = (
                marks.get(value, value) if isinstance(value, str) else value
            )
    return {name: float(value) for name, value in found.items()}


Said = tuple[list[Ask], dict[str, float] | str | None]
"""What was asked, and the scores; None: it failed."""


async def plain(info: InspectTaskInfo, folder: Path) -> Said:
    asks: list[Ask] = []

    def answer(
        messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        if len(asks) == MAX_CALLS:
            raise RuntimeError("no more replies")
        asks.append(asked(messages, tools, choice, config))
        return reply()

    model = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    assert isinstance(model.api, MockLLM)
    before = ProcessState()
    with silent_display():
        (log,) = await eval_async(
            info.fresh_task(),
            model=model,
            limit=1,
            epochs=Epochs(1, "mean"),
            log_dir=str(folder),
            score_display=False,
        )
    before.restore()
    (sample,) = (await read_eval_log_async(log.location)).samples or [None]
    if sample is None or sample.error is not None:
        return asks, None
    return asks, numbers(sample.scores or {})


class Endpoint(ChatEndpoint):
    """Answers in place of a server, and fails after `MAX_CALLS`."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []

    async def complete(
        self, base_url: str, api_key: str, body: Mapping[str, Any], *, trace: str = ""
    ) -> dict[str, Any]:
        if len(self.bodies) == MAX_CALLS:
            raise TinkerScriptError("no more replies")
        self.bodies.append(dict(body))
        message = {"role": "assistant", "content": SAID}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": f"c{len(self.bodies)}", "model": "policy", "choices": [choice], "usage": {}}


async def by_worker(name: str) -> Said:
    endpoint, task = Endpoint(), InspectTask(name)
    (first, *_) = task.samples(held_out=False)
    model = EpisodeModel(base_url="http://x/v1", api_key="k", endpoint=endpoint)
    scores: dict[str, float] | str | None
    left_out: list[str] = []
    async with InspectTask.resources([task]):
        try:
            output = await task.rollout(first, model)
            scores = cast("dict[str, float]", output.metadata["scores"])
            left_out = cast("list[str]", output.metadata.get("unapplied", []))
        except SelfGradingError:
            scores = REFUSED
        except (BridgeError, TinkerScriptError):
            scores = None
    await endpoint.aclose()
    names = ("model", "messages", "tools", "tool_choice")
    asks: list[Ask] = [
        (
            body["messages"],
            [tool["function"]["name"] for tool in body.get("tools", ())],
            {key: value for key, value in body.items() if key not in names},
            left_out,
        )
        for body in endpoint.bodies
    ]
    return asks, scores


async def by_bridge(info: InspectTaskInfo, renderer: Any) -> tuple[list[list[dict[str, Any]]], Any]:
    """The messages of each prompt, and the scores."""
    dataset = load_environment(info.task, renderer, env_type="task", max_samples=1, max_turns=MAX_CALLS)
    (builder,) = dataset.get_batch(0)
    (env,) = await builder.make_envs()
    assert isinstance(env, InspectEnv)
    try:
        await run_rollout(Says(renderer, SAID + END), env)
        scores = dict(env.scored.values) if env.scored else None
    except SelfGradingError:
        scores = REFUSED
    except BridgeError:
        scores = None
    finally:
        await builder.cleanup()
    converter = ChatConverter()
    prompts = [
        converter.request(messages, [], "auto", GenerateConfig())["messages"] for messages, _ in env.exchanges
    ]
    return prompts, scores


def selected() -> Iterator[Any]:
    """Each fifth task, and the others with the mark `long`."""
    for number, name in enumerate(NAMES):
        yield pytest.param(name, marks=[pytest.mark.long] if number % 5 else [])


@pytest.mark.parametrize("name", selected())
async def test_a_task_means_the_same_in_each_of_three_ways(
    name: str, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = loaded(name, monkeypatch)
    if not info.samples or not info.scorers:
        skip("no samples or no scorer")
    first = info.samples[0]
    if info.sandbox_type or first.sandbox:
        skip("a sandbox")
    if info.task.model_roles or info.task.approval:
        skip("models of roles")
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))  # Some tasks take a reply from an earlier run.
    asks, scores = await plain(load_inspect_task(name), tmp_path)
    if len(asks) == MAX_CALLS or scores is None:
        skip("an agent that goes on, or one that fails")
    worker_asks, worker_scores = await by_worker(name)
    prompts, bridge_scores = await by_bridge(info, bytes_renderer(byte_model))
    if worker_scores == REFUSED:
        assert len(worker_asks) < len(asks), "a scorer asked"
        asks, scores = asks[: len(worker_asks)], REFUSED
        worker_asks = [(*ask[:3], asks[number][3]) for number, ask in enumerate(worker_asks)]
    assert worker_asks == asks
    assert prompts == [messages for messages, *_ in asks]
    for found in (worker_scores, bridge_scores):
        assert found == (scores if isinstance(scores, str) else pytest.approx(scores))
    OUTCOMES[REFUSED if scores == REFUSED else "compared"] += 1


@pytest.mark.parametrize("part", ["sampled", pytest.param("others", marks=pytest.mark.long)])
def test_enough_tasks_were_compared(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{OUTCOMES.total()} of {len(NAMES)} tasks: {dict(OUTCOMES.most_common())}")
    assert OUTCOMES["compared"] >= FLOOR * OUTCOMES.total() > 0
