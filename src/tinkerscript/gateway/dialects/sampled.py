"""What replies tell of the sampled ids beyond the message: which stop string, how much was reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from tinkerscript.gateway.dialects.base import Choice
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

THINK_END = "</think>"
"""The marker that closes reasoning in Qwen's format and most others."""


def reasoning_tokens(tokenizer: LightTokenizer, choice: Choice) -> int:
    """How many of the sampled ids are reasoning, its markers included.

    All of them if the reasoning was cut off; 0 for a format that closes it by another marker.
    """
    marker = tokenizer.convert_tokens_to_ids(THINK_END)
    if marker is None or not choice.message.get("reasoning_content"):
        return 0
    ids = unpack_ids(choice.sampled).tolist()
    return ids.index(marker) + 1 if marker in ids else len(ids)


def matched_stop(tokenizer: LightTokenizer, choice: Choice, stops: Sequence[str]) -> str | None:
    """The stop string that ended a choice: the one that begins first in what was sampled."""
    if not stops or choice.finish_reason != "stop":
        return None
    text = tokenizer.decode(unpack_ids(choice.sampled).tolist())
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None
