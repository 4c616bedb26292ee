"""What keeps a sequence from training: the checks that need nothing but the sequence and its calls.

Linear in the sequence's tokens, whatever the number of its calls.

What is suspicious about a sequence and lets it train: counted by name, once for each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from tinkerscript.rollouts.call import Call, FloatArray
from tinkerscript.rollouts.rollout import Rollout, Segment

POSITIVE_TOLERANCE = 1e-6
"""Log probabilities above this are errors; below it, rounding."""


SENTINEL_LOGPROB = -9999.0
"""Servers that cannot send -inf send this instead."""


FROM_TEXT = frozenset({"text", "retokenised"})
"""Values of `Call.ids_from` that say that ids were made from text."""


ERRORS: Mapping[str, str] = {
    "lengths_differ": "tokens, mask and log probabilities are not one length",
    "nothing_sampled": "no token of the sequence was sampled",
    "id_out_of_range": "a token id is not in the model's vocabulary",
    "logprob_not_finite": "a log probability is NaN or infinite",
    "logprob_positive": "a log probability is above 0",
    "logprobs_all_zero": "all log probabilities are 0, as of a server that has none",
    "logprob_sentinel": "a log probability is -9999 or less, which servers send for -inf",
    "tokens_differ_from_call": "the sequence's sampled tokens are not what the call sampled",
    "logprobs_differ_from_call": "the sequence's log probabilities are not those of the call",
    "prefix_differs_from_prompt": "what comes before a sampled token is not what its call was asked with",
    "mask_differs_from_calls": "a token is marked as sampled that no call sampled, or the other way round",
    "calls_overlap": "two calls claim the same token",
    "reward_on_unsampled_token": "a reward falls on a token that was not sampled",
    "ids_retokenised": "token ids were made from text, so they need not be what was sampled",
    "raw_logprobs_at_temperature": "log probabilities at temperature 1 of tokens sampled at another one",
    "temperature_not_one": "sampled at another temperature than 1, which the trainer cannot compare",
    "logprobs_shifted": "the log probabilities fit the tokens one or two places away",
    "logprobs_truncated": "the log probabilities of a call end before its tokens do",
    "logprobs_of_the_likeliest": "the log probabilities are of the likeliest token, not of the sampled one",
    "logprobs_contradict": "the same prefix has two log probabilities for one token, or more than 1 in all",
    "logprob_gap": "the sampler's log probabilities are not the trainer's, in no way that is known",
}
"""Name -> what is wrong. The last ones are found by comparison (`diagnosis`, `siblings`)."""


def find_errors(
    rollout: Rollout, *, vocabulary: int, prompts: Mapping[str, bytes] | None = None
) -> list[str]:
    """The names of what is wrong with a sequence by itself; empty if it may train.

    `prompts`: the whole prompts of its episode's calls (`full_prompts`). They are needed to check the prefix
    of a call whose parent is in another sequence; without them that prefix is taken as it is.
    """
    length = len(rollout.tokens)
    arrays = [rollout.sampled, rollout.logprobs] + ([] if rollout.rewards is None else [rollout.rewards])
    if any(len(array) != length for array in arrays):
        return ["lengths_differ"]
    if not rollout.sampled.any():
        return ["nothing_sampled"]
    errors: list[str] = []
    if rollout.tokens.min() < 0 or rollout.tokens.max() >= vocabulary:
        errors.append("id_out_of_range")
    errors += _logprob_errors(rollout.logprobs[rollout.sampled])
    if rollout.rewards is not None and rollout.rewards[~rollout.sampled].any():
        errors.append("reward_on_unsampled_token")
    return errors + sorted({*_segment_errors(rollout), *_prefix_errors(rollout, prompts or {})})


def _logprob_errors(logprobs: FloatArray) -> list[str]:
    errors: list[str] = []
    if not np.isfinite(logprobs).all():
        errors.append("logprob_not_finite")
    if (logprobs > POSITIVE_TOLERANCE).any():
        errors.append("logprob_positive")
    if len(logprobs) > 1 and (logprobs == 0).all():
        errors.append("logprobs_all_zero")
    if (logprobs <= SENTINEL_LOGPROB).any():
        errors.append("logprob_sentinel")
    return errors


def _segment_errors(rollout: Rollout) -> Iterator[str]:
    covered = np.zeros(len(rollout.tokens), dtype=np.int8)
    for segment in rollout.segments:
        covered[segment.start : segment.end] += 1
        yield from _call_errors(segment.call)
        if rollout.tokens[segment.start : segment.end].tobytes() != segment.call.sampled:
            yield "tokens_differ_from_call"
        elif not _same(rollout.logprobs[segment.start : segment.end], segment.call.sampled_logprobs):
            yield "logprobs_differ_from_call"
    if (covered > 1).any():
        yield "calls_overlap"
    if ((covered > 0) != rollout.sampled).any():
        yield "mask_differs_from_calls"


def _same(ours: FloatArray, theirs: FloatArray) -> bool:
    """Equal, or both not numbers: that has a name of its own."""
    return ours.tobytes() == theirs.tobytes() or not np.isfinite(ours).all()


def _call_errors(call: Call) -> Iterator[str]:
    if call.temperature != 1:
        # The trainer's log probabilities are those of temperature 1; others cannot be compared with them.
        yield "raw_logprobs_at_temperature" if call.logprob_kind == "raw" else "temperature_not_one"
    if call.ids_from in FROM_TEXT:
        yield "ids_retokenised"


def _prefix_errors(rollout: Rollout, prompts: Mapping[str, bytes]) -> Iterator[str]:
    """Each call's prompt against the tokens before it.

    A call whose parent comes before it here is checked from the parent's end on: what is before that has been
    checked with the parent.
    """
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
        ends[call.call_id] = segment


WARNINGS: Mapping[str, str] = {
    "no_stop_token": "a reply ended by itself, but not with a stop token: a stop string did, or it was cut",
    "stop_token_inside": "a stop token stands inside a reply",
    "usage_differs": "the server counted other many tokens than it sent",
    "prompt_rendered_by_the_client": "the prompt's ids are the client's own rendering, not the server's",
    "prompt_differs_from_local_rendering": "the server's prompt is not what the client would have rendered",
    "top_p": "sampled with top-p: the log probabilities are of the distribution before the cut",
    "top_k": "sampled with top-k: the log probabilities are of the distribution before the cut",
    "greedy": "sampled at temperature 0: nothing is explored",
    "logprob_kind_unknown": "it is not known what the log probabilities are of",
    "tokenizer_differs": "the prompt was rendered with another tokenizer than the trainer's",
    "prefix_broken": "a conversation became several sequences",
    "short_response": "a reply of fewer than 5 tokens",
    "logprobs_all_zero": "a reply whose log probabilities are all 0",
    "logprob_gap": "a step's mean difference from the trainer is above the threshold of warnings",
}
"""Name -> what it means. Some are counted by those who read a server's reply (`InferenceContext`)."""


def find_warnings(rollout: Rollout, *, stop_ids: Collection[int] = (), tokenizer: str = "") -> Counter[str]:
    """Warnings about a sequence's calls, by name.

    `stop_ids`: the tokens that end a turn; none: not checked. `tokenizer`: the fingerprint of the trainer's.
    """
    found: Counter[str] = Counter()
    stops = np.fromiter(stop_ids, dtype=np.int32)
    for segment in rollout.segments:
        found.update(_about(segment.call, tokenizer))
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


def _about(call: Call, tokenizer: str) -> Iterator[str]:
    if call.prompt_from == "client":
        yield "prompt_rendered_by_the_client"
    if call.top_p < 1:
        yield "top_p"
    if call.top_k > 0:
        yield "top_k"
    if call.temperature == 0:
        yield "greedy"
    if call.logprob_kind == "unknown":
        yield "logprob_kind_unknown"
    if tokenizer and call.tokenizer and call.tokenizer != tokenizer:
        yield "tokenizer_differs"
