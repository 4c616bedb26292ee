"""Metrics of a step: the table, and the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_helpers import make_accepted, make_call, make_episode, make_group
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.collector import Batch
from tinkerscript.train.step_metrics import (
    StepFacts,
    extra_metrics,
    role_metrics,
    step_metrics,
    why_groups_do_not_train,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

OWN = """
def best(facts):
    return {"reward/best": max(outcome.reward for outcome in facts.accepted)}
"""


def accepted(uuid: str, reward: float, **fields: object) -> EpisodeAccepted:
    return make_accepted(uuid, reward, **fields)


def facts() -> StepFacts:
    batch = Batch("step 4")
    first = accepted("a", 1.0, group_id="g", is_success=True, log_metrics={"turns": 2.0, "limit/token": 1.0})
    told = {"turns": 4.0, "limit/token": 1.0}
    retried = accepted("b", 0.0, is_success=False, log_metrics=told, retries=[{"kind": "x"}])
    batch.adopt([first, retried])
    failed = EpisodeFailed(episode_uuid="d", failures=[{"kind": "task_error"}])
    batch.adopt([accepted("c", 0.5, group_id="h"), failed])
    group = make_group([make_episode([make_call(None, [1], [2])], reward) for reward in (1.0, 0.0)])
    return StepFacts(
        batch=batch,
        groups=[group],
        lags={0: 2, 1: 3, 2: 4, None: 5},
        stale={f"old-{number}" for number in range(9)},
        policy_version=7,
        cancelled=6,
        tasks=["one", "two"],
        task_of={"a": "one", "b": "one", "c": "two"},
        rollout_s=1.5,
        train_s=0.5,
    )


def test_why_nothing_trained_says_what_was_missing() -> None:
    called = make_group([make_episode([make_call(None, [1], [2])], reward) for reward in (1.0, 0.0)])
    silent = make_group([make_episode([], reward) for reward in (1.0, 0.0)])
    assert "called the model: nothing to train on" in why_groups_do_not_train([silent])
    left_out = why_groups_do_not_train([called, silent], errors={"greedy": 2})
    assert left_out == "the alignment check left out every sequence: 2 greedy"


def test_groups_of_equal_rewards_train_where_something_else_acts_on_them() -> None:
    equal = make_group([make_episode([make_call(None, [1], [2])], 0.5) for _ in range(2)])
    for trains, expected in ((True, (1, 0, None)), (False, (0, 1, 0.5))):
        own = step_metrics(replace(facts(), groups=[equal], trains_equal=trains))
        judge = role_metrics("judge", [equal], {}, {}, trains_equal=trains)
        for found, prefix in ((own, ""), (judge, "role/judge/")):
            names = (f"{prefix}groups/{name}" for name in ("trained", "same_reward", "same_reward_mean"))
            assert tuple(map(found.get, names)) == expected


def test_the_wait_is_divided_as_the_episodes_divide_their_time() -> None:
    found = step_metrics(replace(facts(), rollout_s=10.0, wait_stale_s=2.0, sampling_share=0.25))
    assert (found["time/sample_s"], found["time/wait_stale_s"]) == (2.0, 2.0)


def no_package() -> int:
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")


@pytest.mark.parametrize(("utilization", "load"), [(lambda: 37, {"system/gpu_load": 0.37}), (no_package, {})])
def test_the_load_of_a_gpu_is_what_torch_says_of_it(
    monkeypatch: pytest.MonkeyPatch, utilization: Callable[[], int], load: dict[str, float]
) -> None:
    """With a stand-in for `torch.cuda`, whose `utilization` is in percent and needs nvidia-ml-py."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True, mem_get_info=lambda: (60e9, 80e9), utilization=utilization
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    found = step_metrics(facts())
    gpu = {name: value for name, value in found.items() if name.startswith("system/gpu")}
    assert gpu == {"system/gpu_memory_gb": 20.0, **load}


def test_the_metrics_of_a_step() -> None:
    found = step_metrics(facts())
    machine = {name: found.pop(name) for name in list(found) if name.startswith("system/")}
    assert {"system/load", "system/memory_gb", "system/trainer_gb"} <= machine.keys()
    assert 0 < machine["system/trainer_gb"] < machine["system/memory_gb"]
    assert found == {
        "reward/mean": 0.5,
        "reward/deviation": (0.5 / 3) ** 0.5,
        "reward/lowest": 0.0,
        "reward/highest": 1.0,
        "success/rate": 0.5,
        "reward/one": 0.5,
        "reward/two": 0.5,
        "episodes/accepted": 3,
        "episodes/failed": 1,
        "episodes/retried": 1,
        "episodes/stale": 9,
        "episodes/used": 2,
        "episodes/cancelled": 6,
        "groups/trained": 1,
        "groups/same_reward": 0,
        "groups/dropped": 1,
        "policy_version": 7,
        "lag/0": 2,
        "lag/1": 3,
        "lag/2": 4,
        "lag/gone": 5,
        "time/rollout_s": 1.5,
        "time/train_s": 0.5,
        "time/publish_s": 0.0,
        "episodes_per_s": 2,
        "episode/turns": 3,
        "limit/token": 2,
        "failure/task_error": 1,
    }


def test_a_metric_of_the_users_own_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    config = RunConfig.model_validate({"metrics": {"extra": [f"{tmp_path}/mine.py:best"]}})
    (best,) = extra_metrics(config)
    assert best(facts()) == {"reward/best": 1.0}
    wrong = RunConfig.model_validate({"metrics": {"extra": [f"{tmp_path}/mine.py:worst"]}})
    with pytest.raises(ConfigError, match=r"metrics\.extra: cannot import '.*mine\.py:worst'"):
        extra_metrics(wrong)
