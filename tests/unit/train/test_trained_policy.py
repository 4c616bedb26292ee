"""Policies that train beside each other: their rewards, groups, seeds, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import tinker
from fastapi import HTTPException

from rollout_helpers import make_accepted, make_call
from run_ledger import KeptRows
from small_models import sft_datum
from tinkerscript.config import RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import EngineError, GatewayError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.rollouts.call import Call, pack_ids
from tinkerscript.sampler import SampleRequest
from tinkerscript.server.routes.episodes import _checked_reward  # pyright: ignore[reportPrivateUsage]
from tinkerscript.testing import ScriptedSampler
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.learner import Learner
from tinkerscript.train.policy import Policy
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, usable
from trainer_fakes import ScriptedPublisher, made_learner


def accepted(uuid: str, *roles: str, reward: float = 0.0, **more: Any) -> EpisodeAccepted:
    """An episode with a call for each of `roles`."""
    calls = [make_call(None, [1, number], [2, 3], role=role) for number, role in enumerate(roles)]
    return make_accepted(uuid, reward, calls, **more)


def policy(role: str) -> Learner:
    return made_learner(None, role=role)


# Rewards


@pytest.mark.parametrize(
    ("more", "own", "theirs"),
    [
        ({}, 0.5, 0.5),
        ({"role_rewards": {"rival": -1.0}}, 0.5, -1.0),
        ({"role_rewards": {"policy": 2.0}}, 2.0, 0.5),
        ({"log_metrics": {"score/rival": 0.25, "rival": 9.0}}, 0.5, 0.25),
        ({"log_metrics": {"score/policy": 9.0}}, 0.5, 0.5),
        ({"log_metrics": {"score/rival": 0.25}, "role_rewards": {"rival": 3.0}}, 0.5, 3.0),
    ],
)
def test_a_role_has_its_own_reward_or_the_score_of_its_name_or_the_episodes(
    more: dict[str, Any], own: float, theirs: float
) -> None:
    episode = accepted("e", "", "rival", reward=0.5, **more)
    assert (episode.reward_of(""), episode.reward_of("rival")) == (own, theirs)


def test_a_reward_of_a_role_that_is_out_of_bounds_fails_its_episode() -> None:
    outcome = usable(accepted("e", "", role_rewards={"rival": 1e7}))
    assert isinstance(outcome, EpisodeFailed)
    assert "rival: must be a finite number" in str(outcome.failures[-1]["message"])


def test_a_score_that_would_be_a_reward_out_of_bounds_is_refused_at_its_client() -> None:
    output = WorkflowOutput(reward=0.5, log_metrics={"score/rival": 1e7})
    assert _checked_reward(output, 1e6, ()) == 0.5, "nobody trains on it"
    with pytest.raises(HTTPException, match="score/rival: must be a finite number from") as refused:
        _checked_reward(output, 1e6, ("rival",))
    assert refused.value.status_code == 422


# Groups


def test_a_policy_takes_its_own_calls_and_the_episodes_that_have_some() -> None:
    groups = [
        ("a", [accepted("1", "", "rival", reward=1), accepted("2", ""), accepted("3", "rival", "")]),
        ("b", [accepted("4", "", "rival"), accepted("5", "")]),
    ]
    own, rival = policy(""), policy("rival")
    for each in (own, rival):
        each.take(groups)
    uuids = [[[e.episode_uuid for e in g.episodes] for g in each.groups] for each in (own, rival)]
    assert uuids == [[["1", "2", "3"], ["4", "5"]], [["1", "3"]]]
    for each in (own, rival):
        calls = [call for group in each.groups for episode in group.episodes for call in episode.calls]
        merged = [
            segment.call
            for group in each.groups
            for episode in group.episodes
            for rollout in episode.rollouts
            for segment in rollout.segments
        ]
        assert {call.role for call in [*calls, *merged]} == {each.role}
    assert (own.report.step.calls, rival.report.step.calls) == (5, 2)
    rival.take(groups[1:])
    assert (rival.groups, rival.report.step.calls, rival.report.whole.calls) == ([], 0, 2)


# What samples


async def test_each_policy_samples_from_its_own_weights_with_its_own_seeds(
    random_model: Path, tmp_path: Path
) -> None:
    request = SampleRequest(prompt=pack_ids([5, 9]), max_tokens=4)
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path) as engine:
        backend = EmbeddedBackend(engine)
        rival = await backend.open_policy("rival", "", checkpoint_dir=tmp_path / "rival", restore=None)
        made = Policy(backend, KeptRows(), seed=7)
        made.add_trained("rival", rival)
        with pytest.raises(GatewayError, match="no weights have been published yet"):
            await made.sample(replaced(request, "rival"))
        assert await made.publish(0) == 0
        own = [await made.sample(request) for _ in range(2)]
        theirs = [await made.sample(replaced(request, "rival")) for _ in range(2)]
        assert {result.policy_version for result in (*own, *theirs)} == {0}
        assert len({result.seed for result in (*own, *theirs)}) == 4
        await trained(rival)
        assert await made.publish(1) == 1
        again = [await made.sample(replaced(request, role, seed=own[0].seed)) for role in ("", "rival")]
        first, other = (result.sequences[0] for result in again)
        assert first.logprobs == own[0].sequences[0].logprobs, "the policy itself has not trained"
        assert other.logprobs != first.logprobs
        with pytest.raises(GatewayError, match="neither trains nor holds a role 'judge'"):
            await made.sample(replaced(request, "judge"))


async def test_the_seeds_of_a_result_that_is_kept_are_not_given_out_again() -> None:
    request = SampleRequest(prompt=pack_ids([5, 9]), max_tokens=1, role="rival")

    async def first_seeds(*taken: Call) -> list[int | None]:
        made, sampler = Policy(ScriptedPublisher(), KeptRows(), seed=7), ScriptedSampler(lambda _: [1])
        made.add_trained("rival", ScriptedPublisher(sampler))
        made.note(make_accepted("e", 0.0, taken))
        await made.publish(0)
        for _ in range(2):
            await made.sample(request)
        return [each.seed for each in sampler.requests]

    first, second = await first_seeds()
    assert await first_seeds(make_call(None, [1], [2], seed=first)) == [first, second], "of the policy"
    assert (await first_seeds(make_call(None, [1], [2], seed=first, role="rival")))[0] == second


def replaced(request: SampleRequest, role: str, seed: int | None = None) -> SampleRequest:
    return SampleRequest(prompt=request.prompt, max_tokens=request.max_tokens, role=role, seed=seed)


# Weights

DATUM = sft_datum([5, 9, 33, 2])


async def trained(backend: Any) -> None:
    """Change the weights a lot."""
    for _ in range(2):
        await backend.client.forward_backward([DATUM], "cross_entropy")
        await backend.client.optim_step(tinker.AdamParams(learning_rate=0.02))


async def logprobs(backend: Any) -> list[float]:
    output = await backend.client.forward([DATUM], "cross_entropy")
    return output.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()


@pytest.fixture(params=[None, LoraSettings(4, targets=("attn",), seed=3)], ids=["all weights", "lora"])
def engine_of_two(
    request: pytest.FixtureRequest, random_model: Path, tmp_path: Path
) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, seed=3, lora=request.param) as engine:
        yield engine


async def test_two_policies_of_one_engine_train_and_are_saved_apart(
    engine_of_two: EmbeddedEngine, tmp_path: Path
) -> None:
    backend = EmbeddedBackend(engine_of_two)
    folder = tmp_path / "rival"
    rival = await backend.open_policy("rival", "", checkpoint_dir=folder, restore=None)
    assert await logprobs(rival) == pytest.approx(await logprobs(backend), abs=1e-6), "the same start"
    before = await logprobs(backend)
    await trained(rival)
    assert await logprobs(backend) == pytest.approx(before, abs=1e-7)
    saved = await logprobs(rival)
    assert abs(np.array(saved) - before).max() > 1e-3
    await rival.client.save_state("step_0001")
    await trained(backend)
    assert await logprobs(rival) == pytest.approx(saved, abs=1e-7)
    await backend.client.save_state("step_0001")
    assert {path.name for path in folder.iterdir()} == {"step_0001"}

    # Continued: weights and moments. Begun anew from the same checkpoint: the weights alone.
    again = await backend.open_policy("rival", "", checkpoint_dir=folder, restore="step_0001")
    start = str(folder / "step_0001")
    fresh = await backend.open_policy("rival", start, checkpoint_dir=tmp_path / "fresh", restore=None)
    for each in (again, fresh):
        assert await logprobs(each) == pytest.approx(saved, abs=1e-6)
    for each in (rival, again, fresh):
        await trained(each)
    assert await logprobs(again) == pytest.approx(await logprobs(rival), abs=1e-5)
    assert abs(np.array(await logprobs(fresh)) - await logprobs(rival)).max() > 1e-4


async def test_a_checkpoint_of_another_kind_is_no_start(random_model: Path, tmp_path: Path) -> None:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path) as engine:
        backend = EmbeddedBackend(engine)
        await backend.client.save_state("whole")
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, lora=LoraSettings(4)) as engine:
        backend = EmbeddedBackend(engine)
        with pytest.raises(EngineError, match=r"not a LoRA adapter"):
            await backend.open_policy("r", str(tmp_path / "whole"), checkpoint_dir=tmp_path, restore=None)


# Configs


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"roles": {"r": {"kind": "trained", "base_url": "http://h"}}}, "kind: trained has no base_url"),
        ({"roles": {"r": {"kind": "frozen", "learning_rate": 1}}}, "learning_rate is for kind: trained"),
        ({"engine": {"devices": 2}}, r"roles\.r: kind: trained trains on one device"),
        ({"method": "sft"}, r"roles\.r: kind: trained learns from episodes"),
        (
            {"inference": {"backend": "vllm", "base_url": "http://h"}},
            r"roles\.r: the trainer samples for a trained role",
        ),
        ({"training": {"distillation": {"teacher": "r"}}}, "'r' is not one of the roles of kind: frozen"),
    ],
)
def test_a_role_that_could_not_train_is_refused(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=reason):
        RunConfig.model_validate({"roles": {"r": {"kind": "trained"}}, **data})


def test_a_role_learns_as_the_run_does_but_for_its_rate_and_the_teacher() -> None:
    config = RunConfig.model_validate(
        {
            "roles": {"r": {"kind": "trained", "learning_rate": 0.5}, "s": {"kind": "trained"}}
            | {"t": {"kind": "frozen"}},
            "training": {"learning_rate": 0.1, "steps": 7, "distillation": {"teacher": "t"}},
        }
    )
    assert list(config.trained_roles) == ["r", "s"]
    assert [config.training_of(role).learning_rate for role in ("", "r", "s")] == [0.1, 0.5, 0.1]
    assert [config.training_of(role).distillation.teacher for role in ("", "r")] == ["t", ""]
    assert config.training_of("r").steps == 7
