"""Rollouts in the formats of other trainers: Tinker, verl and TRL (docs/rollouts.md#converters).

If a format cannot hold something that a rollout has (`TRAITS`), its converter raises ConversionError, unless
the caller accepts the loss (`allow`). A sequence with an alignment error is never converted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutBatch, RolloutGroup, WeightedRollout, padded
from tinkerscript.rollouts.alignment.checks import ERRORS, find_errors
from tinkerscript.rollouts.call import Call, FloatArray, full_prompts
from tinkerscript.rollouts.rollout import ByteArray, EpisodeRollouts, Rollout

if TYPE_CHECKING:
    import tinker

# Properties that affect the gradient and that a format may be unable to hold.
TRAITS: Mapping[str, str] = {
    "several_sequences": "an episode of several sequences, whose reward must count once",
    "token_rewards": "token rewards that are shares of the episode's reward",
    "temperature": "a temperature other than 1",
    "mixed_sampling": "calls with different sampling parameters",
    "top_p": "top-p below 1, which restricts what the policy could sample",
    "top_k": "top-k, which restricts what the policy could sample",
    "min_p": "min-p, which restricts what the policy could sample",
    "repetition_penalty": "a repetition penalty, which changes what the policy could sample",
    "logprob_kind": "logprobs not known to be of the distribution that was sampled from",
    "images": "images, which the ids only have placeholders for",
}

_TRAITS_OF_CALLS: Mapping[str, Callable[[Call], bool]] = {
    "temperature": lambda call: call.temperature != 1,
    "top_p": lambda call: call.top_p < 1,
    "top_k": lambda call: call.top_k > 0,
    "min_p": lambda call: call.min_p > 0,
    "repetition_penalty": lambda call: call.repetition_penalty != 1,
    "logprob_kind": lambda call: (
        call.logprob_kind != "processed" and (call.logprob_kind != "raw" or call.temperature != 1)
    ),
    "images": lambda call: bool(call.images),
}

# For other trainers, these errors are the traits `temperature` and `logprob_kind`.
_OTHER_TRAINERS_MAY = frozenset({"greedy", "raw_logprobs_at_temperature"})


class _Row(NamedTuple):
    group_id: str
    episode: EpisodeRollouts
    rollout: Rollout


Numbers = npt.NDArray[np.float32] | npt.NDArray[np.int64]

Fields = Mapping[str, Callable[[_Row], Any]]


# Tinker


def to_datum(weighted: WeightedRollout, *, allow: Collection[str] = ()) -> tinker.Datum:
    """Convert a rollout of T tokens to a Datum of T - 1 positions, for Tinker's policy-gradient losses.

    Worked example, prompt `p q`, response `r s`, advantage 0.5:
        model_input     p    q    r
        target_tokens   q    r    s
        logprobs        0    l_r  l_s
        advantages      0    0.5  0.5
    Raises ConversionError for anything that a Datum cannot hold, such as a temperature: Tinker's losses
    compare with logprobs at temperature 1.
    """
    rollout, form = weighted.rollout, "a Tinker Datum"
    refuse_errors(rollout, {}, form)
    if len(weighted.advantages) != len(rollout.tokens) or weighted.advantages[~rollout.loss_mask].any():
        raise ConversionError(
            f"{form}: episode {rollout.episode_uuid} needs one advantage for each token, 0 where a token "
            "carries no loss"
        )
    if not np.isfinite(weighted.advantages).all():
        raise ConversionError(f"{form}: an advantage of episode {rollout.episode_uuid} is not finite")
    # Advantages include token rewards, so these are not lost.
    _refuse_traits(_traits(rollout), rollout.episode_uuid, form, {"token_rewards"}, allow)
    return to_training_datum(weighted)


def to_training_datum(weighted: WeightedRollout, **more: Numbers) -> tinker.Datum:
    """Convert a rollout that passed the alignment check. `more`, here and below: further inputs of the loss,
    float32 [T] each, or `packed_experts`.
    """
    rollout = weighted.rollout
    reference = rollout.logprobs if weighted.reference is None else weighted.reference
    return _datum(rollout, logprobs=reference, advantages=weighted.advantages, **more)


def to_scoring_datum(rollout: Rollout, **more: Numbers) -> tinker.Datum:
    """Convert a rollout to a Datum for `cross_entropy`, with weight 1 on tokens with loss."""
    return _datum(rollout, weights=rollout.loss_mask.astype(np.float32), **more)


def packed_experts(rows: ByteArray) -> npt.NDArray[np.int64]:
    """uint8 [T, bytes] -> int64 [T, bytes / 8, rounded up]: Tinker's tensors have no bytes."""
    padding = np.zeros((len(rows), -rows.shape[1] % 8), np.uint8)
    return np.hstack([rows, padding]).view("<i8")


def _datum(rollout: Rollout, **inputs: Numbers) -> tinker.Datum:
    import tinker  # noqa: PLC0415 (optional dependency)

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(rollout.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(rollout.tokens[1:].astype(np.int64)),
            **{name: tinker.TensorData.from_numpy(each[1:].copy()) for name, each in inputs.items()},
        },
    )


# TRL (huggingface/trl, `GRPOTrainer`, 1.16)

TRL_FIELDS: Fields = {
    "prompt_ids": lambda row: row.rollout.prompt_tokens.tolist(),
    "completion_ids": lambda row: row.rollout.response_tokens.tolist(),
    "logprobs": lambda row: row.rollout.response_logprobs.tolist(),
    "env_mask": lambda row: row.rollout.response_loss_mask.astype(int).tolist(),
    "reward": lambda row: row.episode.reward,
    "group_id": lambda row: row.group_id,
    "episode_uuid": lambda row: row.episode.episode_uuid,
}


def to_trl(groups: Sequence[RolloutGroup], *, allow: Collection[str] = ()) -> dict[str, list[Any]]:
    """Convert groups of one size to a `rollout_func`'s result: parallel lists with an entry per episode.

    TRL forms groups from `num_generations` consecutive rows. Its reward functions get further fields by name:
    `reward_funcs=[lambda reward, **_: reward]`. It uses `logprobs` only with `use_vllm` and
    `vllm_importance_sampling_correction`. Raises ConversionError.
    """
    sizes = sorted({len(group.episodes) for group in groups})
    if len(sizes) != 1:
        raise ConversionError(f"TRL finds groups by their size, which must be the same for all: got {sizes}")
    return _columns(TRL_FIELDS, _rows(groups, "TRL's rollout", (), allow))


# verl (volcengine/verl, `DataProto`, 0.9)

VERL_RESPONSE_FIELDS: Fields = {
    "response_mask": lambda row: row.rollout.response_loss_mask.astype(np.int64),
    "rollout_log_probs": lambda row: row.rollout.response_logprobs,
    "rm_scores": lambda row: _reward_at_end(row),
}


def to_verl(
    batch: RolloutBatch,
    *,
    pad_token_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    allow: Collection[str] = (),
) -> dict[str, Any]:
    """Convert a batch of B episodes for `DataProto.from_single_dict`. P and R are the given or longest
    lengths.

    Tensors: prompts int64 [B, P], left-padded; responses, response_mask int64 and rollout_log_probs,
    rm_scores float32 [B, R], right-padded; input_ids, attention_mask, position_ids int64 [B, P + R]. `uid` is
    an object array [B] of group ids. Raises ConversionError, also for a prompt or response that is too long.
    """
    import torch  # noqa: PLC0415 (optional dependency)

    rows = _rows(batch.groups, "verl's batch", {"token_rewards"}, allow)
    prompts = [row.rollout.prompt_tokens.astype(np.int64) for row in rows]
    responses = [row.rollout.response_tokens.astype(np.int64) for row in rows]
    p, r = _width("prompt", prompts, prompt_length), _width("response", responses, response_length)
    attention = np.hstack(
        [
            padded(list(map(np.ones_like, prompts)), p, left=True),
            padded(list(map(np.ones_like, responses)), r),
        ]
    )
    arrays = {
        "prompts": padded(prompts, p, pad_token_id, left=True),
        "responses": padded(responses, r, pad_token_id),
        **{name: padded([of(row) for row in rows], r) for name, of in VERL_RESPONSE_FIELDS.items()},
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
    }
    arrays["input_ids"] = np.hstack([arrays["prompts"], arrays["responses"]])
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors | {"uid": np.array([row.group_id for row in rows], dtype=object)}


def _width(what: str, rows: Sequence[np.ndarray], wanted: int | None) -> int:
    longest = max(map(len, rows))
    if wanted is not None and longest > wanted:
        raise ConversionError(
            f"a {what} has {longest} tokens, more than {what}_length={wanted}; "
            "truncating it would lose tokens"
        )
    return longest if wanted is None else wanted


# Shared by the converters


def _columns(fields: Fields, rows: Iterable[_Row]) -> dict[str, list[Any]]:
    return {name: [value(row) for row in rows] for name, value in fields.items()}


def _rows(
    groups: Iterable[RolloutGroup], form: str, carried: Collection[str], allow: Collection[str]
) -> list[_Row]:
    rows: list[_Row] = []
    for group in groups:
        for episode in group.episodes:
            refuse_episode_errors(episode, form)
            traits = [trait for rollout in episode.rollouts for trait in _traits(rollout)]
            if len(episode.rollouts) > 1:
                traits.append("several_sequences")
            _refuse_traits(dict.fromkeys(traits), episode.episode_uuid, form, carried, allow)
            if len(episode.rollouts) != 1:
                # Even with `allow`: the reward belongs to a single row.
                raise ConversionError(
                    f"{form} has one row for an episode; episode {episode.episode_uuid} has "
                    f"{len(episode.rollouts)} sequences"
                )
            rows.append(_Row(group.group_id, episode, episode.rollouts[0]))
    if not rows:
        raise ConversionError("the batch has no episodes")
    return rows


def _reward_at_end(row: _Row) -> FloatArray:
    """float32 [R]: the episode's reward at the last token with loss, or its tokens' shares."""
    if row.rollout.shaped:
        return row.rollout.token_rewards
    rewards = np.zeros(len(row.rollout.response_tokens), dtype=np.float32)
    training = np.flatnonzero(row.rollout.response_loss_mask)
    rewards[training[-1] if len(training) else -1] = row.episode.reward
    return rewards


def _traits(rollout: Rollout) -> Iterator[str]:
    calls = [segment.call for segment in rollout.segments]
    if rollout.shaped:
        yield "token_rewards"
    for name, has in _TRAITS_OF_CALLS.items():
        if any(has(call) for call in calls):
            yield name
    if len({(c.temperature, c.top_p, c.top_k, c.min_p, c.repetition_penalty) for c in calls}) > 1:
        yield "mixed_sampling"


def _refuse_traits(
    traits: Iterable[str], episode_uuid: str, form: str, carried: Collection[str], allow: Collection[str]
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


def refuse_episode_errors(episode: EpisodeRollouts, form: str) -> None:
    prompts = full_prompts(episode.calls)
    for rollout in episode.rollouts:
        refuse_errors(rollout, prompts, form)


def refuse_errors(rollout: Rollout, prompts: Mapping[str, bytes], form: str) -> None:
    errors = find_errors(rollout, vocabulary=2**31, prompts=prompts)
    errors = [error for error in errors if error not in _OTHER_TRAINERS_MAY]
    if errors:
        what = "; ".join(f"{error} ({ERRORS[error]})" for error in errors)
        raise ConversionError(f"{form}: the rollout of episode {rollout.episode_uuid} must not train: {what}")
