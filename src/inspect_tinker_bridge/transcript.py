"""An episode's transcript for people: Inspect's record of it as compressed JSON of a bounded size.

Invariant: `pack_transcript` never raises, whatever solvers, tools and scorers put into a record, and what it
returns is within the bounds. Long texts are cut first, then events in the middle are left out.
"""

from __future__ import annotations

import logging
from typing import Any

import zstandard
from inspect_ai.log import EvalSample, condense_events
from pydantic_core import from_json, to_json

MAX_JSON_BYTES = 16 * 2**20
"""Before compression: what a reader has to be ready for."""

TEXT_CHARS = (20_000, 2_000, 200)
"""What is left of each text of a transcript that is too long, until it is short enough."""

EVENTS_AT_ENDS = 100
"""Events that are left at each end of one that is still too long then."""

LEVEL = 3
"""Of zstd."""

_AS_JSON: dict[str, Any] = {
    "exclude_none": True,
    "fallback": repr,
    "inf_nan_mode": "strings",
    "bytes_mode": "base64",
}
"""Whatever a value is, it is written."""

logger = logging.getLogger(__name__)


def pack_transcript(record: EvalSample, max_bytes: int) -> bytes:
    """The record with its events, scores and store: JSON of an `EvalSample` in a frame of zstd, which has at
    most `max_bytes` bytes. Empty if it cannot be written, or is too long however short its texts are.

    What a model call has in common with other calls is in `events_data`, as in Inspect's own logs.
    """
    try:
        return _packed(record, max_bytes)
    except Exception as error:  # noqa: BLE001 (deeper than JSON may be; nothing depends on a transcript)
        logger.info("transcript.not_written sample=%r error=%r", record.id, error)
        return b""


def _packed(record: EvalSample, max_bytes: int) -> bytes:
    events, pooled = condense_events(record.events)
    # The bridge numbers all episodes of an eval as its epochs.
    whole = record.model_copy(update={"epoch": 1, "events": events, "events_data": pooled})
    try:
        text = to_json(whole, **_AS_JSON)
    except ValueError:  # Text or bytes that are not Unicode.
        text = to_json(_cut(whole.model_dump(exclude_none=True), None), **_AS_JSON)
    if b"NaN" in text or b"Infinity" in text:  # Inspect writes them as JSON that only some parsers read.
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
    """`text` compressed; empty if it is too long."""
    if len(text) > MAX_JSON_BYTES:
        return b""
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(text)
    return packed if len(packed) <= max_bytes else b""


def _cut(value: Any, chars: int | None) -> Any:
    """`value` with at most `chars` characters of each text, and without what UTF-8 cannot hold."""
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
