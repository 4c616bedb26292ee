"""`TRAITS`: properties of a rollout that another trainer's format may not support.

Each converter lists the traits it carries; a check raises for any other trait of a rollout, unless the caller
allows its loss by name. A trait affects the gradient; messages, texts and fork reasons do not.

Invariant: nothing is converted that the alignment check would keep from training, whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment.checks import ERRORS, find_errors
from tinkerscript.rollouts.call import Call, full_prompts
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
    "min_p": "min-p, which restricts what the policy could sample",
    "repetition_penalty": "a repetition penalty, which changes what the policy could sample",
    "constrained": "sampled tokens that carry no loss, because a grammar constrained them",
    "logprob_kind": "logprobs not known to be of the distribution that was sampled from",
}
"""Name -> description."""

_OTHER_TRAINERS_MAY = frozenset({"temperature_not_one", "raw_logprobs_at_temperature"})
"""Errors of a sequence for our own trainer. For other trainers they are the traits `temperature` and
`logprob_kind`."""

_TRAITS_OF_CALLS: Mapping[str, Callable[[Call], bool]] = {
    "temperature": lambda call: call.temperature != 1,
    "top_p": lambda call: call.top_p < 1,
    "top_k": lambda call: call.top_k > 0,
    "min_p": lambda call: call.min_p > 0,
    "repetition_penalty": lambda call: call.repetition_penalty != 1,
    "logprob_kind": lambda call: not _is_of_the_sampled_distribution(call),
}


def traits_of_rollout(rollout: Rollout) -> Iterator[str]:
    """Yield the names of a sequence's traits."""
    calls = [segment.call for segment in rollout.segments]
    if len(calls) > 1:
        yield "several_calls"
    if rollout.shaped:
        yield "token_rewards"
    for name, has in _TRAITS_OF_CALLS.items():
        if any(has(call) for call in calls):
            yield name
    if len({_sampling(call) for call in calls}) > 1:
        yield "mixed_sampling"
    if not np.array_equal(rollout.loss_mask, rollout.sampled):
        yield "constrained"


def check_weights_carried(
    weighted: WeightedRollout, form: str, carried: Collection[str], allow: Collection[str]
) -> None:
    """Raise ConversionError for a sequence with errors, or with a trait that `form` does not carry and the
    caller does not `allow`."""
    rollout = weighted.rollout
    _refuse_errors(rollout, {}, form)
    if len(weighted.advantages) != len(rollout.tokens) or weighted.advantages[~rollout.loss_mask].any():
        raise ConversionError(
            f"{form}: the advantages of episode {rollout.episode_uuid} are not one for each token, 0 where a "
            "token carries no loss"
        )
    if not np.isfinite(weighted.advantages).all():
        raise ConversionError(f"{form}: an advantage of episode {rollout.episode_uuid} is not finite")
    traits = [trait for trait in traits_of_rollout(rollout) if trait != "token_rewards"]
    if weighted.scalar is None:
        traits.append("token_advantages")
    _refuse_traits(traits, rollout.episode_uuid, form, carried, allow)


def check_episode_carried(
    episode: EpisodeRollouts, form: str, carried: Collection[str], allow: Collection[str]
) -> None:
    """The same for an episode and all of its sequences."""
    prompts = full_prompts(episode.calls)
    for rollout in episode.rollouts:
        _refuse_errors(rollout, prompts, form)
    traits = [trait for rollout in episode.rollouts for trait in traits_of_rollout(rollout)]
    if len(episode.rollouts) > 1:
        traits.append("several_sequences")
    _refuse_traits(list(dict.fromkeys(traits)), episode.episode_uuid, form, carried, allow)


def only_sequence(
    episode: EpisodeRollouts, form: str, carried: Collection[str], allow: Collection[str]
) -> Rollout:
    """The one sequence of an episode that `form` carries. Raises ConversionError."""
    check_episode_carried(episode, form, carried, allow)
    if len(episode.rollouts) != 1:
        # Impossible even if allowed: the reward belongs to a single row.
        raise ConversionError(
            f"{form} has one row for an episode; episode {episode.episode_uuid} has "
            f"{len(episode.rollouts)} sequences"
        )
    return episode.rollouts[0]


def check_group_sizes(groups: Collection[RolloutGroup], form: str) -> None:
    """Raise ConversionError unless all groups have one size: `form` counts rows to tell groups apart."""
    sizes = sorted({len(group.episodes) for group in groups})
    if len(sizes) != 1:
        raise ConversionError(
            f"{form} tells groups apart by their size, which must be one for all: got {sizes}"
        )


def reward_at_end(episode: EpisodeRollouts, rollout: Rollout) -> np.ndarray:
    """float32 [R]: the episode's reward where its last token carries loss, or its tokens' shares.

    Trainers that propagate a reward back through the mask would lose it at a token without loss.
    """
    if rollout.shaped:
        return rollout.token_rewards
    rewards = np.zeros(len(rollout.response_tokens), dtype=np.float32)
    training = np.flatnonzero(rollout.response_loss_mask)
    rewards[training[-1] if len(training) else -1] = episode.reward
    return rewards


def _refuse_errors(rollout: Rollout, prompts: Mapping[str, bytes], form: str) -> None:
    errors = find_errors(rollout, vocabulary=2**31, prompts=prompts)
    errors = [error for error in errors if error not in _OTHER_TRAINERS_MAY]
    if errors:
        what = "; ".join(f"{error} ({ERRORS[error]})" for error in errors)
        raise ConversionError(f"{form}: the rollout of episode {rollout.episode_uuid} must not train: {what}")


def _refuse_traits(
    traits: Collection[str], episode_uuid: str, form: str, carried: Collection[str], allow: Collection[str]
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


def _sampling(call: Call) -> tuple[float, ...]:
    return call.temperature, call.top_p, call.top_k, call.min_p, call.repetition_penalty


def _is_of_the_sampled_distribution(call: Call) -> bool:
    return call.logprob_kind == "processed" or (call.logprob_kind == "raw" and call.temperature == 1)
