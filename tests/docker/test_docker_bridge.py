"""The bridge with Docker: the document's program as it is written, and many containers at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import container_tasks
import pytest
from inspect_ai.model import ModelOutput
from test_bridge_multi_turn import LLAMA, SOLUTION, submit
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from bridge_parts import Says, call, decode, register_bytes
from engine import IMAGE, Engine, docker
from inspect_tinker_bridge import GenerateRequest, TaskRunner, load_inspect_task

AT_ONCE = 20
TOOL_IMAGE = "aisiuk/inspect-tool-support"
"""What Inspect runs where a task names no image."""


@pytest.fixture
def _tool_image(docker_engine: Engine | None) -> Iterator[None]:
    if docker_engine is None:
        yield  # It pulls it, if it has to.
        return
    docker("tag", IMAGE, TOOL_IMAGE)
    yield
    docker("rmi", TOOL_IMAGE)


@pytest.mark.usefixtures("_tool_image")
async def test_the_documents_multi_turn_program(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    renderer = get_renderer(
        "LlamaRenderer", register_bytes(byte_model, "meta-llama/Llama-3.1-8B-Instruct", LLAMA)
    )

    from examples.coding_task import coding_task  # pyright: ignore[reportMissingImports]

    from inspect_tinker_bridge import load_environment

    dataset = load_environment(
        coding_task,
        renderer=renderer,
        env_type="multi_turn",
        max_turns=10,
        batch_size=4,
        sandbox_type="docker",
    )
    tries = call("python", json.dumps({"code": f"{SOLUTION}\nprint(is_palindrome('aa'))"}))
    looks = call("bash", json.dumps({"command": "test -f /.dockerenv && whoami"}))
    says = Says(renderer, *(f"I try.\n{text}<|eot_id|>" for text in (tries, looks, submit(SOLUTION))))
    builders = dataset.get_batch(0)
    assert len(builders) == 4
    group = await do_group_rollout(builders[0], says)
    assert group.get_total_rewards() == [1.0]
    told = [decode(renderer, prompt).rpartition("<tool_response>")[2] for prompt in says.prompts]
    assert "True" in told[1]
    assert "root" in told[2]


class AllTogether:
    """Answers when every episode has asked."""

    def __init__(self, barrier: asyncio.Barrier) -> None:
        self._barrier = barrier
        self.containers = 0

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        await self._barrier.wait()
        self.containers = len(await asyncio.to_thread(docker, "ps", "--quiet"))
        await self._barrier.wait()
        return ModelOutput.from_content("policy", "seven..")


async def test_twenty_containers_at_once() -> None:
    info = load_inspect_task(container_tasks.light)
    policy = AllTogether(asyncio.Barrier(AT_ONCE))
    before = len(docker("ps", "--quiet"))
    async with TaskRunner(info) as runner:
        outcomes = await asyncio.gather(*(runner.run(info.samples[0], policy) for _ in range(AT_ONCE)))
    assert policy.containers == before + AT_ONCE
    for outcome in outcomes:
        assert outcome.error is None
        assert [score.value for score in outcome.scores.values()] == [1]
