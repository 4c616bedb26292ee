"""tinker_cookbook's rollouts of the environments in threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward, set_rollout_executor

import bridge_tasks
from bridge_parts import END, bytes_renderer, encode
from bridge_tasks import ScriptedSampling
from inspect_tinker_bridge import load_environment

FILE = f"{Path(bridge_tasks.__file__)}@adding"


@pytest.fixture(scope="module")
def renderer(byte_model: Path) -> Renderer:
    return bytes_renderer(byte_model)


async def test_threads_that_run_groups_take_turns_with_inspect(renderer: Renderer) -> None:
    client: Any = ScriptedSampling(
        [encode(renderer, text) for text in ScriptedSampling.TURNS], encode(renderer, END)[0]
    )
    dataset = load_environment(FILE, renderer, env_type="task", num_envs_per_group=2, batch_size=3)
    with ThreadPoolExecutor(3) as executor:
        set_rollout_executor(executor)
        try:
            groups = await asyncio.gather(
                *(
                    do_group_rollout_and_filter_constant_reward(
                        client, builder, 64, 1.0, False, enable_logging=False
                    )
                    for builder in dataset.get_batch(0)
                )
            )
        finally:
            set_rollout_executor(None)
    rewards = [group.get_total_rewards() for group in groups if group is not None]
    assert rewards == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    for group in groups:
        assert group is not None
        assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [2, 2]
