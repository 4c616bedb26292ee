"""Rewards of episodes: scorers, weights, custom functions. What cannot be a number is a failure, never 0."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, exact, includes, mean, scorer
from inspect_ai.solver import TaskState, generate
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Trajectory

from bridge_groups import group_of, group_that_says, scoring
from bridge_parts import Says
from inspect_tinker_bridge import TaskFailedError, compute_reward


@scorer(metrics={"*": [mean()]})
def aspects() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"short": 1, "polite": "P"}, answer="a", explanation="because")

    return score


SAMPLE = Sample(input="?", target="4", id=3)


def asked() -> Task:
    return Task(dataset=[SAMPLE], solver=generate(), scorer=[exact(), includes(), aspects()])


async def last(renderer: Renderer, text: str = "it is 4", **options: Any) -> tuple[float, Trajectory]:
    group = await group_that_says(asked, renderer, text, **options)
    return group.get_total_rewards()[0], group.trajectories_G[0]


async def test_every_scorer_counts_and_is_reported(renderer: Renderer) -> None:
    reward, trajectory = await last(renderer)
    assert reward == pytest.approx((0 + 1 + 0.75) / 3)
    end = trajectory.transitions[-1]
    scores = {name: value for name, value in end.metrics.items() if name.startswith("score/")}
    assert scores == {
        "score/exact": 0.0,
        "score/includes": 1.0,
        "score/aspects/short": 1.0,
        "score/aspects/polite": 0.5,
    }
    assert end.logs["explanation/aspects"] == "because"
    assert end.logs["answer/aspects"] == "a"


@scoring
async def absent(state: TaskState, target: Target) -> Score | None:
    return None


def half_absent() -> Task:
    return Task(dataset=[SAMPLE], solver=generate(), scorer=[exact(), absent(), includes()])


async def test_a_scorer_that_returns_none_does_not_count_and_the_others_share_its_weight(
    renderer: Renderer,
) -> None:
    for weights, expected in ((None, 0.5), ({"exact": 1, "absent": 6, "includes": 3}, 0.75)):
        group = await group_that_says(half_absent, renderer, "it is 4", scorer_weights=weights)
        assert group.get_total_rewards() == [pytest.approx(expected)]
    weights = {"exact": 0, "absent": 1, "includes": 0}
    with pytest.raises(TaskFailedError, match=r"have the weight 0: \['exact', 'includes'\]"):
        await group_that_says(half_absent, renderer, "it is 4", scorer_weights=weights)
    talk = [{"role": "assistant", "content": "it is 4"}]
    with pytest.raises(TaskFailedError, match="without a score; check that the task has a scorer"):
        await compute_reward(talk, SAMPLE, [absent()])


async def test_an_action_without_an_end_is_not_valid_format(renderer: Renderer) -> None:
    group = await group_of(asked, renderer, Says(renderer, "4"))
    assert group.trajectories_G[0].transitions[-1].metrics["format_valid"] == 0.0
