"""What a teacher reads and the policy does not: `informed_prompts`.

A program that knows more than it showed the model, such as the right answer, leaves it in its result's
metadata (`CONTEXT`). The teacher scores the same sampled tokens after a prompt with it, so the policy
learns to do without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec import structs

from tinkerscript.errors import EngineError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import Call, IntArray, conversation_of, with_messages
from tinkerscript.rollouts.rollout import EpisodeRollouts

CONTEXT = "teacher_context"
"""Metadata key: text after the last message of each sequence's first prompt."""


def informed_prompts(
    episodes: Iterable[EpisodeRollouts], renderer: Callable[[], ChatRenderer]
) -> dict[int, IntArray]:
    """`id` of each sequence with a `CONTEXT` -> its first prompt with that text.

    Raises EngineError unless it is text, and for a prompt without messages.
    """
    found: dict[int, IntArray] = {}
    for episode in episodes:
        context = episode.metadata.get(CONTEXT)
        if context is None:
            continue
        for rollout in episode.rollouts:
            messages, tools = _asked(episode.calls, rollout.segments[0].call)
            if not isinstance(context, str) or not messages:
                what = "the prompt has none" if isinstance(context, str) else f"it is {context!r}"
                raise EngineError(
                    f"episode {episode.episode_uuid}: {CONTEXT} in the metadata is a text that the teacher "
                    f"reads after the last message of the prompt, and {what}"
                )
            ids = renderer().render([*messages[:-1], _with(messages[-1], context)], tools)
            found[id(rollout)] = np.array(ids, np.int32)
    return found


def _asked(calls: Iterable[Call], call: Call) -> tuple[list[Any], list[Any]]:
    by_id = {each.call_id: each for each in with_messages(calls)}
    root = by_id[call.call_id]
    by_id[call.call_id] = structs.replace(root, reply="{}")
    while root.parent_id:
        root = by_id[root.parent_id]
    before = list(by_id.values())[: list(by_id).index(call.call_id) + 1]
    return conversation_of(before), json.loads(root.tools)


def _with(message: dict[str, Any], text: str) -> dict[str, Any]:
    said = message.get("content") or ""
    return {**message, "content": f"{said}\n\n{text}" if isinstance(said, str) else [*said, _part(text)]}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
