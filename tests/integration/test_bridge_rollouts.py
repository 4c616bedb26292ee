"""tinker_cookbook's datums of an episode are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, solver
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory

import bridge_tasks
from bridge_parts import END, Says, bytes_renderer, call, calls_of
from bridge_tasks import ScriptedSampling
from inspect_tinker_bridge import load_environment
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.trainers import to_datum


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


@solver
def rewriting() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages[-1].content = "something else"
        state.messages.append(state.messages[0].model_copy(update={"id": "again"}))
        return await generate(state)

    return solve


EDITED = Task(dataset=[Sample(input="x", target="1", id=1)], solver=rewriting(), scorer=match())
# Spacing that no renderer writes, and a call that does not parse: kept as sampled.
SPELLED = [
    " x \n" + call("add", '{"a":1,   "b":0}'),
    "<tool_call>\n{no\n</tool_call>",
    *ScriptedSampling.TURNS[1:],
]


@pytest.mark.parametrize(
    ("task", "texts", "sequences"),
    [(f"{Path(bridge_tasks.__file__)}@adding", SPELLED, 1), (EDITED, ["1"], 2)],
    ids=["unedited", "edited"],
)
async def test_an_episode_is_the_same_data(
    byte_model: Path, task: Any, texts: list[str], sequences: int
) -> None:
    renderer = bytes_renderer(byte_model)
    dataset = load_environment(task, renderer, env_type="task")
    policy = Says(renderer, *(text.removesuffix(END) + END for text in texts))
    group = await do_group_rollout(dataset.get_batch(0)[0], policy)
    assert_same_data(group.trajectories_G[0], sequences)
