"""An episode as a row of `episodes`: what lists show of it, and the words that the search knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tinkerscript.record.entries import EpisodeDetail, RecordedEpisode
from tinkerscript.rollouts.call import Call, calls_of

PREVIEW_CHARS = 160
MAX_INDEXED_CHARS = 65_536
"""Of an episode's text, for the search."""


def columns_of(episode: RecordedEpisode) -> dict[str, object]:
    """The columns of `episodes`, but for the sample."""
    calls = calls_of(episode.detail.calls)
    versions = [version for call in calls for version in call.policy_versions]
    return {
        "uuid": episode.uuid,
        "type": episode.episode_type,
        "step": episode.step,
        "label": episode.label,
        "group_id": episode.group_id,
        "status": episode.status,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "attempt": episode.attempt,
        "client": episode.client_uuid,
        "started": min((call.created for call in calls if call.created), default=0),
        "ended": episode.ended,
        "calls": len(calls),
        "prompt_tokens": sum(len(call.new_prompt) for call in calls) // 4,
        "sampled_tokens": sum(len(call.sampled) for call in calls) // 4,
        "truncated": sum(call.stop_reason == "length" for call in calls),
        "first_version": min(versions, default=None),
        "last_version": max(versions, default=None),
        "preview": _preview(episode),
        "figures": json.dumps(_figures(episode.detail)),
    }


def _figures(detail: EpisodeDetail) -> dict[str, float]:
    """The scores and the episode's own metrics by name, for filters."""
    scores = detail.metadata.get("scores")
    found = {f"score/{name}": value for name, value in scores.items()} if isinstance(scores, dict) else {}
    found |= detail.log_metrics
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _preview(episode: RecordedEpisode) -> str:
    """The last reply, or why the episode failed."""
    detail = episode.detail
    if episode.status != "accepted" and detail.failures:
        last = detail.failures[-1]
        return _storable(f"{last.get('kind')}: {last.get('message')}"[:PREVIEW_CHARS])
    calls = calls_of(detail.calls)
    words = reply_text(calls[-1]).split() if calls else []
    return _storable(" ".join(words)[:PREVIEW_CHARS])


def reply_text(call: Call) -> str:
    """What a call answered, tools that it called included."""
    reply = json.loads(call.reply) or {}
    return " ".join(_texts(reply))


def _texts(value: Any) -> Iterator[str]:
    """Strings inside a message, but for what only names its parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("role", "id", "type", "tool_call_id"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def searched_text(*names: str, detail: EpisodeDetail) -> str:
    """What the search finds an episode by. `names`: its uuid, and what else it is known by."""
    parts = [*names]
    for call in detail.calls:
        parts += [*_texts(json.loads(call.messages)), reply_text(call)]
    parts += [str(failure.get("message")) for failure in detail.failures]
    return _storable("\n".join(parts)[:MAX_INDEXED_CHARS])


def _storable(text: str) -> str:
    """The text without lone surrogates, which are not UTF-8."""
    return text.encode("utf-8", "replace").decode()
