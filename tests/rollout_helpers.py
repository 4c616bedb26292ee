"""Calls and episodes made by hand or at random, for the tests of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.trainer_link.messages import EpisodeAccepted

if TYPE_CHECKING:  # It leads to torch.
    from tinkerscript.train.learner import Learner

NAMES = count()


def make_call(parent: Call | None, new_prompt: list[int], sampled: list[int], **extra: Any) -> Call:
    """A call with log probabilities -0.1, -0.2, ... unless `logprobs` says others."""
    logprobs = extra.pop("logprobs", [-0.1 * (i + 1) for i in range(len(sampled))])
    fields: dict[str, Any] = {"stop_reason": "stop", "policy_version": 0, **extra}
    return Call(
        call_id=f"c{next(NAMES)}",
        parent_id=parent.call_id if parent else None,
        new_prompt=pack_ids(new_prompt),
        sampled=pack_ids(sampled),
        logprobs=pack_logprobs(logprobs),
        **fields,
    )


def make_episode(
    calls: list[Call], reward: float = 1.0, name: str = "e", *, trains_constrained: bool = False
) -> EpisodeRollouts:
    rollouts = merge_calls(calls, episode_uuid=name, trains_constrained=trains_constrained)
    return EpisodeRollouts(name, reward, rollouts, tuple(calls))


def make_accepted(
    uuid: str = "e", reward: float = 1.0, calls: Sequence[Call] = (), **fields: Any
) -> EpisodeAccepted:
    """A result as it reaches the trainer."""
    given: dict[str, Any] = {"attempt": 1, "client_uuid": "w", **fields}
    return EpisodeAccepted(episode_uuid=uuid, reward=reward, all_calls=list(calls), **given)


def random_calls(
    seed: int, *, turns: int = 4, forks: int = 0, vocabulary: int = 50, **extra: Any
) -> list[Call]:
    """A conversation with random ids and log probabilities, then `forks` calls that branch off it."""
    random = np.random.default_rng(seed)

    def one(parent: Call | None) -> Call:
        sampled = random.integers(0, vocabulary, random.integers(3, 12)).tolist()
        logprobs = (-random.exponential(0.7, len(sampled))).tolist()
        new = random.integers(0, vocabulary, random.integers(2, 9)).tolist()
        return make_call(parent, new, sampled, logprobs=logprobs, **extra)

    calls: list[Call] = []
    for _ in range(turns):
        calls.append(one(calls[-1] if calls else None))
    for _ in range(forks):
        calls.append(one(calls[int(random.integers(0, turns - 1))]))
    return calls


def make_group(episodes: list[EpisodeRollouts], name: str = "g") -> RolloutGroup:
    return RolloutGroup(name, tuple(episodes))


async def update(
    learner: Learner, groups: Sequence[RolloutGroup], *, step: int, **more: Any
) -> dict[str, float]:
    """One step of a learner; `more`: `lag_of_version` and `replayed`, of `Learner.check`."""
    learner.begin(groups)
    await learner.check(step=step, **more)
    return await learner.train(step)
