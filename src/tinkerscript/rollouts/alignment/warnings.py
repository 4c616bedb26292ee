"""What is suspicious about a sequence and lets it train: counted by name, once for each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.types import Rollout

WARNINGS: Mapping[str, str] = {
    "no_stop_token": "a reply ended with a stop string, or was cut off, instead of ending with a stop token",
    "stop_token_inside": "a reply contains a stop token before its end",
    "usage_differs": "the server's token count differs from the number of tokens it sent",
    "prompt_rendered_by_the_client": "the client rendered the prompt ids, not the server",
    "prompt_differs_from_local_rendering": "the server's prompt differs from the client's own rendering",
    "top_p": "sampled with top-p: the logprobs are of the distribution before the cutoff",
    "top_k": "sampled with top-k: the logprobs are of the distribution before the cutoff",
    "greedy": "sampled at temperature 0: no exploration",
    "logprob_kind_unknown": "it is not known which distribution the logprobs are of",
    "tokenizer_differs": "the prompt was rendered with a tokenizer other than the trainer's",
    "prefix_broken": "a conversation became several sequences",
    "short_response": "a reply of fewer than 5 tokens",
    "logprobs_all_zero": "a reply whose logprobs are all 0",
    "logprob_gap": "a step's mean difference from the trainer is above the warning threshold",
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
