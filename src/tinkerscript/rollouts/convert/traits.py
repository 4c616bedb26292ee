"""`TRAITS`: properties of a rollout that another trainer's format may not support.

Each converter lists the traits it carries; `check_carried` raises for any other trait of a rollout, unless
the caller allows its loss by name. A trait affects the gradient; messages, texts and fork reasons do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout

TRAITS: Mapping[str, str] = {
    "several_calls": "more than one sampled span, which needs a mask over the response",
    "several_sequences": "an episode of several sequences, whose reward must count once",
    "token_rewards": "token rewards that are shares of the episode's reward",
    "token_advantages": "advantages that differ between tokens",
    "temperature": "a temperature other than 1",
    "mixed_sampling": "calls with different sampling parameters",
    "top_p": "top-p below 1, which restricts what the policy could sample",
    "top_k": "top-k, which restricts what the policy could sample",
    "logprob_kind": "logprobs not known to be of the distribution that was sampled from",
}
"""Name -> description."""


def traits_of_rollout(rollout: Rollout) -> Iterator[str]:
    """Yield the names of a sequence's traits."""
    calls = [segment.call for segment in rollout.segments]
    if len(calls) > 1:
        yield "several_calls"
    if rollout.shaped:
        yield "token_rewards"
    if any(call.temperature != 1 for call in calls):
        yield "temperature"
    if len({_sampling(call) for call in calls}) > 1:
        yield "mixed_sampling"
    if any(call.top_p < 1 for call in calls):
        yield "top_p"
    if any(call.top_k > 0 for call in calls):
        yield "top_k"
    if not all(_is_of_the_sampled_distribution(call) for call in calls):
        yield "logprob_kind"


def check_carried(rollout: Rollout, form: str, carried: Collection[str], allow: Collection[str]) -> None:
    """Raise ConversionError for a trait that `form` does not carry and the caller does not `allow`."""
    _check(traits_of_rollout(rollout), rollout.episode_uuid, form, carried, allow)


def check_weights_carried(
    weighted: WeightedRollout, form: str, carried: Collection[str], allow: Collection[str]
) -> None:
    """The same for a sequence with advantages instead of rewards."""
    traits = [trait for trait in traits_of_rollout(weighted.rollout) if trait != "token_rewards"]
    if weighted.scalar is None:
        traits.append("token_advantages")
    _check(traits, weighted.rollout.episode_uuid, form, carried, allow)


def check_episode_carried(
    episode: EpisodeRollouts, form: str, carried: Collection[str], allow: Collection[str]
) -> None:
    """The same for an episode and all of its sequences."""
    if len(episode.rollouts) > 1:
        _check(["several_sequences"], episode.episode_uuid, form, carried, allow)
    for rollout in episode.rollouts:
        check_carried(rollout, form, carried, allow)


def _check(
    traits: Collection[str] | Iterator[str],
    episode_uuid: str,
    form: str,
    carried: Collection[str],
    allow: Collection[str],
) -> None:
    unknown = set(allow) - set(TRAITS)
    if unknown:
        raise ConversionError(f"allow: {sorted(unknown)} are not traits; the traits are {', '.join(TRAITS)}")
    lost = [trait for trait in traits if trait not in carried and trait not in allow]
    if lost:
        what = "; ".join(f"{trait} ({TRAITS[trait]})" for trait in lost)
        raise ConversionError(
            f"{form} cannot hold the rollout of episode {episode_uuid}: {what}. "
            "Leave the rollout out, or accept the loss by naming the trait in `allow`"
        )


def _sampling(call: Call) -> tuple[float, float, int]:
    return call.temperature, call.top_p, call.top_k


def _is_of_the_sampled_distribution(call: Call) -> bool:
    return call.logprob_kind == "processed" or (call.logprob_kind == "raw" and call.temperature == 1)
