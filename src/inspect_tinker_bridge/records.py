"""Inspect's records of episodes: a log of several, or a packed transcript of one.

A log appears only once it is complete. `pack_transcript` never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import zstandard
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    condense_events,
    write_eval_log,
)
from pydantic_core import from_json, to_json

from inspect_tinker_bridge.episodes import MODEL_NAME

MAX_JSON_BYTES = 16 * 2**20  # Before compression, which bounds readers' memory.
TEXT_CHARS = (20_000, 2_000, 200)  # Texts are cut to these lengths in turn.
EVENTS_AT_ENDS = 100  # At each end of a transcript still too long.
LEVEL = 3

_AS_JSON: dict[str, Any] = {
    "exclude_none": True,
    "fallback": repr,
    "inf_nan_mode": "strings",
    "bytes_mode": "base64",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRollout:
    task: str
    batch: int | None
    record: EvalSample
    reward: float | None
    turns: Sequence[tuple[list[int], list[int]]] = ()
    """Prompt ids and sampled ids of each action."""


def write_inspect_log(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """Write an Inspect log (`.eval`) with tokens and rewards in the metadata.

    Episodes of the same sample become its epochs, in order.
    """
    epochs: dict[int | str, int] = {}
    samples: list[EvalSample] = []
    for rollout in rollouts:
        record = rollout.record
        epoch = epochs[record.id] = epochs.get(record.id, 0) + 1
        seen = {
            "reward": rollout.reward,
            "batch": rollout.batch,
            "prompt_ids": [prompt for prompt, _ in rollout.turns],
            "sampled_ids": [action for _, action in rollout.turns],
        }
        update = {"epoch": epoch, "metadata": {**record.metadata, "rollout": seen}}
        samples.append(record.model_copy(update=update))
    spec = EvalSpec(
        created=datetime.now(UTC).isoformat(),
        run_id=uuid4().hex,
        task=rollouts[0].task,
        task_id=uuid4().hex,
        dataset=EvalDataset(samples=len(epochs)),
        model=MODEL_NAME,
        config=EvalConfig(epochs=max(epochs.values(), default=1)),
    )
    log = EvalLog(status="success", eval=spec, results=_mean_reward(rollouts), samples=samples)
    unfinished = path.with_name(f".{path.name}")
    try:
        write_eval_log(log, str(unfinished), format="eval")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _mean_reward(rollouts: Sequence[SavedRollout]) -> EvalResults:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    scores: list[EvalScore] = []
    if rewards:
        mean = EvalMetric(name="mean", value=sum(rewards) / len(rewards))
        scores.append(EvalScore(name="reward", scorer="reward", metrics={"mean": mean}))
    return EvalResults(total_samples=len(rollouts), completed_samples=len(rewards), scores=scores)


def pack_transcript(record: EvalSample, max_bytes: int) -> bytes:
    """The record as JSON of an `EvalSample` in a zstd frame of at most `max_bytes` bytes.

    Long texts are cut first, then events in the middle left out. Returns b"" if that does not suffice.
    """
    try:
        return _packed(record, max_bytes)
    except Exception as error:  # noqa: BLE001 (deeper than JSON may be; nothing depends on a transcript)
        logger.info("transcript.not_written sample=%r error=%r", record.id, error)
        return b""


def _packed(record: EvalSample, max_bytes: int) -> bytes:
    events, pooled = condense_events(record.events)
    # Our epochs number an eval's episodes, which means nothing outside.
    whole = record.model_copy(update={"epoch": 1, "events": events, "events_data": pooled})
    try:
        text = to_json(whole, **_AS_JSON)
    except ValueError:  # Text or bytes that are not Unicode.
        text = to_json(_cut(whole.model_dump(exclude_none=True), None), **_AS_JSON)
    if b"NaN" in text or b"Infinity" in text:  # Only some parsers read Inspect's JSON for these.
        text = to_json(from_json(text), **_AS_JSON)
    if packed := _within(text, max_bytes):
        return packed
    value = from_json(text)
    for chars in TEXT_CHARS:
        value = _cut(value, chars)
        if packed := _within(to_json(value), max_bytes):
            return packed
    return _within(to_json(_without_the_middle(value)), max_bytes)


def _within(text: bytes, max_bytes: int) -> bytes:
    if len(text) > MAX_JSON_BYTES:
        return b""
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(text)
    return packed if len(packed) <= max_bytes else b""


def _cut(value: Any, chars: int | None) -> Any:
    if isinstance(value, str):
        left = value[:chars].encode("utf-8", "replace").decode()
        more = 0 if chars is None else len(value) - chars
        return left if more <= 0 else f"{left}… ({more} more characters)"
    if isinstance(value, list | tuple | set):
        return [_cut(item, chars) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {_cut(key, chars): _cut(item, chars) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def _without_the_middle(value: dict[str, Any]) -> dict[str, Any]:
    events = value["events"]
    left_out = len(events) - 2 * EVENTS_AT_ENDS
    if left_out <= 0:
        return value
    note = {"event": "info", "source": "inspect_tinker_bridge", "data": f"{left_out} events are left out"}
    note |= {"timestamp": events[EVENTS_AT_ENDS].get("timestamp")}
    return {**value, "events": [*events[:EVENTS_AT_ENDS], note, *events[-EVENTS_AT_ENDS:]]}
