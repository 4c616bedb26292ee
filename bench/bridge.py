"""What an episode of the Inspect bridge costs, against one `eval_async` per sample in the same run.

    python bench/bridge.py [--episodes 400] [--long 5000]

Prints: single-turn episodes per second at 1, 16 and 128 in flight; the reference; 3-turn tool episodes
without a sandbox; the share of the processor time outside the bridge's own modules; time and memory per
episode over a long run.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from inspect_ai import Task, eval_async
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import Tool, ToolCall, tool

from inspect_tinker_bridge import GenerateRequest, TaskRunner, load_inspect_task
from inspect_tinker_bridge._inspect_private import ProcessState, silent_display

SAMPLE = Sample(input="Say 1.", target="1", id=1)
TURNS = 3


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    return execute


def said(text: str, *calls: ToolCall) -> ModelOutput:
    """A model output with its usage."""
    message = ChatMessageAssistant(content=text, tool_calls=list(calls) or None, source="generate")
    choice = ChatCompletionChoice(message=message, stop_reason="tool_calls" if calls else "stop")
    return ModelOutput(model="scripted", choices=[choice], usage=ModelUsage(total_tokens=2))


class Says:
    """A policy that answers at once: `turns - 1` tool calls, then the answer."""

    def __init__(self, turns: int) -> None:
        self.left = turns

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        self.left -= 1
        if self.left > 0:
            return said("", ToolCall(id=str(self.left), function="add", arguments={"a": 0, "b": 1}))
        submit = ToolCall(id="end", function="submit", arguments={"answer": "1"})
        return said("1", submit) if request.tools else said("1")


def single() -> Task:
    """One call, then `match`."""
    return Task(dataset=[SAMPLE], solver=generate(), scorer=match())


def with_tools() -> Task:
    """An agent with one tool and no sandbox."""
    return Task(dataset=[SAMPLE], solver=react(tools=[add()]), scorer=match())


async def rate(runner: TaskRunner, episodes: int, at_once: int, turns: int = 1) -> float:
    """Episodes per second."""
    limit = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with limit:
            outcome = await runner.run(SAMPLE, Says(turns))
            if outcome.error is not None or outcome.scores["match"].value != "C":
                raise RuntimeError(f"an episode went wrong: {outcome.error or outcome.scores}")

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(episodes)))
    return episodes / (time.perf_counter() - start)


async def reference(episodes: int) -> float:
    """Samples per second with an eval of its own for each: one process runs one at a time."""
    before = ProcessState()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, silent_display():
        for _ in range(episodes):
            model = get_model("mockllm/model", custom_outputs=[said("1")], memoize=False)
            (log,) = await eval_async(
                single(),
                model=model,
                log_dir=folder,
                log_samples=False,
                log_realtime=False,
                score_display=False,
            )
            if log.status != "success":
                raise RuntimeError(f"the reference eval ended with {log.status}")
    before.restore()
    return episodes / (time.perf_counter() - start)


async def inspects_share(runner: TaskRunner, episodes: int) -> float:
    """Share of the processor time inside functions outside the bridge's own modules."""
    profile = cProfile.Profile()
    profile.enable()
    await rate(runner, episodes, 16)
    profile.disable()
    times: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sum(row[2] for where, row in times.items() if "inspect_tinker_bridge" in where[0])
    return 1 - own / sum(row[2] for row in times.values())


async def long_run(runner: TaskRunner, episodes: int) -> list[tuple[float, float]]:
    """Milliseconds an episode and resident MiB, for each tenth of a long run."""
    process = psutil.Process()
    tenths: list[tuple[float, float]] = []
    for _ in range(10):
        per_second = await rate(runner, episodes // 10, 16)
        tenths.append((1000 / per_second, process.memory_info().rss / 2**20))
    return tenths


async def with_runner(task: Callable[[], Task], work: Callable[[TaskRunner], Awaitable[Any]]) -> Any:
    """Run `work` on a warm runner."""
    async with TaskRunner(load_inspect_task(task)) as runner:
        await rate(runner, 20, 4, TURNS if task is with_tools else 1)
        return await work(runner)


async def main(episodes: int, long: int) -> None:
    """Measure and print."""
    for at_once in (1, 16, 128):
        found = await with_runner(single, lambda runner, n=at_once: rate(runner, episodes, n))
        print(f"single turn, {at_once:3} in flight   {found:7.1f} episodes/s")
    per_eval = await reference(max(10, episodes // 10))
    print(f"one eval_async a sample       {per_eval:7.1f} episodes/s   {found / per_eval:.1f} times slower")
    tools = await with_runner(with_tools, lambda runner: rate(runner, episodes // 2, 16, TURNS))
    print(f"{TURNS} turns with a tool           {tools:7.1f} episodes/s")
    share = await with_runner(single, lambda runner: inspects_share(runner, episodes // 2))
    print(f"outside the bridge's own code {100 * share:7.1f} % of the processor time")
    if long:
        tenths = await with_runner(single, lambda runner: long_run(runner, long))
        print(f"over {long} episodes, a tenth a line: ms an episode, MiB resident")
        for milliseconds, mebibytes in tenths:
            print(f"  {milliseconds:6.2f} {mebibytes:8.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--long", type=int, default=5000)
    options = parser.parse_args()
    asyncio.run(main(options.episodes, options.long))
