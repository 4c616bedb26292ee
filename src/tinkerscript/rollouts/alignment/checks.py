"""Checks of one sequence against its calls, in time linear in its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerscript.rollouts.call import Call, FloatArray, moved_images
from tinkerscript.rollouts.rollout import Rollout, Segment

POSITIVE_TOLERANCE = 1e-6  # Rounding errors reach this.
SENTINEL_LOGPROB = -9999.0  # Sent by servers that cannot send -inf.
FROM_TEXT = frozenset({"text", "retokenised"})  # `Call.ids_from` of encoded text.

# `diagnosis` finds the last six.
ERRORS: Mapping[str, str] = {
    "lengths_differ": "tokens, mask, and logprobs have different lengths",
    "nothing_sampled": "the sequence has no sampled token",
    "prompt_empty": "no token comes before the first sampled one",
    "id_out_of_range": "a token id is not in the model's vocabulary",
    "logprob_not_finite": "a logprob is NaN or infinite",
    "logprob_positive": "a logprob is above 0",
    "logprobs_all_zero": "all logprobs are 0, as from a server that has none",
    "logprob_sentinel": "a logprob is -9999 or less, which servers send for -inf",
    "tokens_differ_from_call": "the sequence's sampled tokens are not those that the call sampled",
    "logprobs_differ_from_call": "the sequence's logprobs are not the call's",
    "prefix_differs_from_prompt": "the tokens before a sampled token are not the prompt of its call",
    "images_differ_from_prompt": "the images before a sampled token are not in the prompt of its call",
    "mask_differs_from_calls": "a token is marked as sampled that no call sampled, or the reverse",
    "calls_overlap": "two calls claim the same token",
    "reward_on_unsampled_token": "a token that was not sampled has a reward",
    "loss_on_unsampled_token": "a token that was not sampled carries loss",
    "ids_retokenised": "the token ids were made from text and may differ from what was sampled",
    "raw_logprobs_at_temperature": "logprobs at temperature 1 of tokens sampled at another temperature",
    "temperature_not_one": "sampled at a temperature other than 1, at which the trainer or the teacher, a "
    "service, cannot score",
    "greedy": "sampled at temperature 0: the most probable token is no sample of a distribution",
    "constrained": "a grammar took choices away, and training.constrained_tokens is refuse",
    "experts_of_another_model": "the recorded experts do not fit the trainer's layers, or their number",
    "logprobs_shifted": "the logprobs match the tokens one or two positions away",
    "logprobs_truncated": "the logprobs of a call end before its tokens do",
    "logprobs_of_the_likeliest": "the logprobs belong to the most likely token, not to the sampled one",
    "logprobs_contradict": "after one prefix, a token has two logprobs, or probabilities sum to more than 1",
    "logprob_gap": "the sampler's logprobs differ from the trainer's in no known pattern",
}


def find_errors(
    rollout: Rollout,
    *,
    vocabulary: int,
    prompts: Mapping[str, bytes] | None = None,
    refuse_constrained: bool = False,
    scales_logits: bool = True,
) -> list[str]:
    """Return the names of a sequence's errors; empty if it may train.

    `vocabulary`: number of token ids. `prompts`: the episode's full prompts (`full_prompts`); without them,
    calls with a parent in another sequence are checked from their new prompt ids on. `scales_logits`: whether
    the trainer scores at the sampling temperature.
    """
    length = len(rollout.tokens)
    arrays = [rollout.sampled, rollout.loss_mask, rollout.logprobs, rollout.rewards]
    if any(array is not None and len(array) != length for array in arrays):
        return ["lengths_differ"]
    if not rollout.sampled.any():
        return ["nothing_sampled"]
    errors: list[str] = []
    if any(segment.start == 0 for segment in rollout.segments):
        errors.append("prompt_empty")
    if rollout.tokens.min() < 0 or rollout.tokens.max() >= vocabulary:
        errors.append("id_out_of_range")
    logprobs = rollout.logprobs[rollout.sampled]
    errors += logprob_errors(logprobs)
    if len(logprobs) > 1 and (logprobs == 0).all():
        errors.append("logprobs_all_zero")
    if rollout.rewards is not None and rollout.rewards[~rollout.sampled].any():
        errors.append("reward_on_unsampled_token")
    if rollout.loss_mask[~rollout.sampled].any():
        errors.append("loss_on_unsampled_token")
    if refuse_constrained and any(segment.call.is_constrained for segment in rollout.segments):
        errors.append("constrained")
    return errors + sorted(
        {*_segment_errors(rollout, scales_logits), *_prefix_errors(rollout, prompts or {})}
    )


def logprob_errors(logprobs: npt.NDArray[np.floating[Any]]) -> list[str]:
    errors: list[str] = []
    if not np.isfinite(logprobs).all():
        errors.append("logprob_not_finite")
    if (logprobs > POSITIVE_TOLERANCE).any():
        errors.append("logprob_positive")
    if (logprobs <= SENTINEL_LOGPROB).any():
        errors.append("logprob_sentinel")
    return errors


def _segment_errors(rollout: Rollout, scales_logits: bool) -> Iterator[str]:
    covered = np.zeros(len(rollout.tokens), dtype=np.int8)
    for segment in rollout.segments:
        covered[segment.start : segment.end] += 1
        yield from _call_errors(segment.call, scales_logits)
        if rollout.tokens[segment.start : segment.end].tobytes() != segment.call.sampled:
            yield "tokens_differ_from_call"
        elif not _same(rollout.logprobs[segment.start : segment.end], segment.call.sampled_logprobs):
            yield "logprobs_differ_from_call"
    if (covered > 1).any():
        yield "calls_overlap"
    if ((covered > 0) != rollout.sampled).any():
        yield "mask_differs_from_calls"


def _same(ours: FloatArray, theirs: FloatArray) -> bool:
    """Values that are not finite count as equal, because they have another error."""
    return ours.tobytes() == theirs.tobytes() or not np.isfinite(ours).all()


def _call_errors(call: Call, scales_logits: bool) -> Iterator[str]:
    if call.temperature == 0:
        yield "greedy"
    elif call.temperature != 1 and call.logprob_kind == "raw":
        # Losses need the sampled distribution's.
        yield "raw_logprobs_at_temperature"
    elif call.temperature != 1 and not scales_logits:
        yield "temperature_not_one"
    if call.ids_from in FROM_TEXT:
        yield "ids_retokenised"


def _prefix_errors(rollout: Rollout, prompts: Mapping[str, bytes]) -> Iterator[str]:
    """Compare each call's prompt, or after a parent in this sequence its new ids, with earlier tokens."""
    tokens, ends = rollout.tokens, dict[str, Segment]()
    for segment in rollout.segments:
        call = segment.call
        parent = ends.get(call.parent_id or "")
        if call.parent_id is None:
            fits = tokens[: segment.start].tobytes() == call.new_prompt
        elif parent is not None:
            fits = tokens[parent.end : segment.start].tobytes() == call.new_prompt
        elif call.call_id in prompts:
            fits = tokens[: segment.start].tobytes() == prompts[call.call_id]
        else:
            new = len(call.new_prompt) // 4
            fits = tokens[max(0, segment.start - new) : segment.start].tobytes() == call.new_prompt
        if not fits:
            yield "prefix_differs_from_prompt"
        first = segment.start - len(call.new_prompt) // 4
        new = [image for image in rollout.images if first <= image.start < segment.start]
        if new != moved_images(call.images, first):
            yield "images_differ_from_prompt"
        ends[call.call_id] = segment


# `InferenceContext` counts the ones about replies.
WARNINGS: Mapping[str, str] = {
    "no_stop_token": "a reply ended with a stop string, or was cut off, instead of ending with a stop token",
    "stop_token_inside": "a reply contains a stop token before its end",
    "usage_differs": "the server's token count differs from the number of tokens it sent",
    "prompt_rendered_by_the_client": "the client rendered the prompt ids, not the server",
    "prompt_differs_from_local_rendering": "the server's prompt differs from the client's own rendering",
    "top_p": "sampled with top-p, and trained with the logprobs from before the cut: the gradient is biased",
    "top_k": "sampled with top-k, and trained with the logprobs from before the cut: the gradient is biased",
    "min_p": "sampled with min-p, and trained with the logprobs from before the cut: the gradient is biased",
    "repetition_penalty": "sampled with a repetition penalty, which no trainer reproduces",
    "constrained": "a grammar forced tokens of a reply or cut its choices",
    "logprob_kind_unknown": "it is not known which distribution the logprobs are of",
    "tokenizer_differs": "the prompt was rendered with a tokenizer other than the trainer's",
    "prefix_broken": "a conversation became several sequences",
    "short_response": "a reply of fewer than 5 tokens",
    "logprobs_all_zero": "a reply whose logprobs are all 0",
    "logprob_gap": "a step's mean difference from the trainer is above the warning threshold",
}


def find_warnings(rollout: Rollout, *, stop_ids: Collection[int] = (), tokenizer: str = "") -> Counter[str]:
    """Count the warnings about a sequence's calls by name.

    `stop_ids`: tokens that end a turn; empty skips their check. `tokenizer`: the trainer's fingerprint.
    """
    found: Counter[str] = Counter()
    stops = np.fromiter(stop_ids, dtype=np.int32)
    for segment in rollout.segments:
        found.update(_call_warnings(segment.call, tokenizer))
    if not len(stops):
        return found
    is_stop = rollout.sampled & np.isin(rollout.tokens, stops)
    seen = np.concatenate([[0], is_stop.cumsum()])
    for segment in rollout.segments:
        ends_with_one = bool(is_stop[segment.end - 1])
        if segment.call.stop_reason == "stop" and not ends_with_one:
            found["no_stop_token"] += 1
        if seen[segment.end] - seen[segment.start] > ends_with_one:
            found["stop_token_inside"] += 1
    return found


def _call_warnings(call: Call, tokenizer: str) -> Iterator[str]:
    if call.prompt_from == "client":
        yield "prompt_rendered_by_the_client"
    if call.top_p < 1:
        yield "top_p"
    if call.top_k > 0:
        yield "top_k"
    if call.min_p > 0:
        yield "min_p"
    if call.repetition_penalty != 1:
        yield "repetition_penalty"
    if call.is_constrained:
        yield "constrained"
    if call.logprob_kind == "unknown":
        yield "logprob_kind_unknown"
    if tokenizer and call.tokenizer and call.tokenizer != tokenizer:
        yield "tokenizer_differs"
