"""tinker_cookbook's own loops over the environments: its data are ours, and several tasks run at once."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact, match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import (
    do_group_rollout,
)
from tinker_cookbook.rl.types import Trajectory

import bridge_tasks
from bridge_parts import END, Says, bytes_renderer, call, calls_of
from bridge_tasks import ScriptedSampling
from inspect_tinker_bridge import load_environment
from small_models import small_model
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.trainers import to_datum

FILE = f"{Path(bridge_tasks.__file__)}@adding"


@pytest.fixture(scope="module")
def renderer(byte_model: Path) -> Renderer:
    return bytes_renderer(byte_model)


def assert_same_data(trajectory: Trajectory, sequences: int) -> None:
    """tinker_cookbook's datums of a trajectory and ours: tokens, targets, masks, logprobs, advantages."""
    theirs = trajectory_to_data(trajectory, 0.5)
    calls = calls_of(trajectory.transitions)
    ours = [
        to_datum(WeightedRollout.uniform(rollout, 0.5)) for rollout in merge_calls(calls, episode_uuid="e")
    ]
    assert len(theirs) == len(ours) == sequences
    for their, our in zip(theirs, ours, strict=True):
        assert their.model_input.to_ints() == our.model_input.to_ints()
        for name in ("target_tokens", "logprobs", "advantages"):
            expected, made = (datum.loss_fn_inputs[name].to_numpy() for datum in (their, our))
            np.testing.assert_array_equal(made, np.asarray(expected, dtype=made.dtype), err_msg=name)
        mask = their.loss_fn_inputs["mask"].to_numpy()
        np.testing.assert_array_equal(mask != 0, our.loss_fn_inputs["advantages"].to_numpy() != 0)


async def test_an_unedited_episode_is_one_datum_and_it_equals_ours(renderer: Renderer) -> None:
    dataset = load_environment(FILE, renderer, env_type="task")
    # Spacing that no renderer writes, and a call that does not parse: kept as sampled.
    texts = [
        " x \n" + call("add", '{"a":1,   "b":0}'),
        "<tool_call>\n{no\n</tool_call>",
        *ScriptedSampling.TURNS[1:],
    ]
    policy = Says(renderer, *(text.removesuffix(END) + END for text in texts))
    group = await do_group_rollout(dataset.get_batch(0)[0], policy)
    assert_same_data(group.trajectories_G[0], sequences=1)


@solver
def rewriting() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages[-1].content = "something else"
        state.messages.append(state.messages[0].model_copy(update={"id": "again"}))
        return await generate(state)

    return solve


async def test_an_edited_episode_forks_as_theirs_does(renderer: Renderer) -> None:
    task = Task(dataset=[Sample(input="x", target="1", id=1)], solver=rewriting(), scorer=match())
    dataset = load_environment(task, renderer, env_type="task")
    group = await do_group_rollout(dataset.get_batch(0)[0], Says(renderer, "1" + END))
    assert_same_data(group.trajectories_G[0], sequences=2)


class Meets(Says):
    """Says its text when all those of the barrier have been asked."""

    def __init__(self, renderer: Renderer, barrier: asyncio.Barrier, text: str) -> None:
        super().__init__(renderer, text)
        self.barrier = barrier

    async def __call__(self, *args: Any, **options: Any) -> TokensWithLogprobs:
        await self.barrier.wait()
        return await super().__call__(*args, **options)


async def test_the_embedded_engine_samples_through_their_completer(
    renderer: Renderer, byte_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(byte_model, tmp_path / "model")
    small_model("Qwen3", vocab_size=320, num_key_value_heads=2, max_position_embeddings=4096).save_pretrained(
        folder
    )
    file = f"{bridge_tasks.__file__}@adding"
    dataset = load_environment(file, renderer, env_type="task", num_envs_per_group=4, max_turns=2)
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path, seed=1) as engine:
        policy = TinkerTokenCompleter(await engine.create_sampling_client(), max_tokens=12)
        group = await do_group_rollout(dataset.get_batch(0)[0], policy)
    for trajectory in group.trajectories_G:
        assert (len(trajectory.transitions), trajectory.stop_reason) == (2, "max_turns")
        assert_same_data(trajectory, sequences=1)
    assert len(group.trajectories_G) == 4


async def test_groups_of_different_tasks_and_options_run_at_the_same_time(renderer: Renderer) -> None:
    """In one eval; each waits for the others' model calls."""
    one = Task(dataset=[Sample(input="x", target="1", id=1)], solver=generate(), scorer=match())
    other = Task(
        dataset=[Sample(input="x", target="1", id=1)], solver=generate(), scorer=exact(), sandbox="local"
    )
    datasets = [
        load_environment(FILE, renderer, env_type="task"),
        load_environment(FILE, renderer, env_type="single_turn"),
        load_environment(one, renderer),
        load_environment(other, renderer, env_type="multi_turn"),
    ]
    barrier = asyncio.Barrier(2 * len(datasets))
    builders = [pickle.loads(pickle.dumps(datasets[index].get_batch(0)[0])) for index in (0, 1)]
    builders += [dataset.get_batch(0)[0] for dataset in datasets[2:]]
    builders += [dataset.get_batch(0)[0] for dataset in datasets]
    async with asyncio.timeout(60):
        groups = await asyncio.gather(
            *(
                do_group_rollout(builder, Meets(renderer, barrier, ScriptedSampling.TURNS[1]))
                for builder in builders
            )
        )
    rewards = [group.get_total_rewards() for group in groups]
    assert rewards == [[1.0], [1.0], [0.0], [1.0]] * 2
