"""An episode's transcript as a list of readable events, or as raw text if it is invalid."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader

TRANSCRIPT_BYTES = 16 * 2**20  # The bridge packs no more.

MAX_EVENTS = 20_000
EVENTS_PER_PAGE = 100
SHOWN_CHARS_OF_MESSAGE = 20_000
MAX_RAW_CHARS = 2000
MAX_DEPTH = 12
LABEL_CHARS = 200
LAST_MESSAGES = 4  # Of a call's prompt.

# Many places may name one attachment, so that a small transcript could expand to terabytes.
EXPANDED_CHARS = 32 * 2**20  # Of a page's events.

ATTACHMENT = "attachment://"

# Unpacking takes many times the transcript's size.
_one_at_a_time = threading.Lock()


class Part(BaseModel):
    label: str
    text: str


class TimelineEvent(BaseModel):
    kind: str = Field(description="Inspect's name: model, tool, score, store, sandbox, error, ...")
    title: str
    depth: int = Field(description="Nesting depth in solvers, agents and tools.")
    seconds: float | None = Field(description="Seconds since the first event.")
    took_s: float | None
    failed: bool
    parts: list[Part]


class TranscriptView(BaseModel):
    attempt: int
    attempts: list[int] = Field(description="The attempts with a transcript.")
    events: list[TimelineEvent]
    total: int = Field(description="Number of all events.")
    next: int | None = Field(description="`offset` for the next page; null on the last page.")
    store: str = Field(description="The sample's store at the end, as JSON; empty if it had none.")
    problem: str | None = Field(description="Why it cannot be read, or null.")
    raw: str = Field(description="The beginning of an unreadable transcript.")


class Pool(msgspec.Struct):
    """Messages that several model calls share."""

    messages: list[msgspec.Raw] = []


class Transcript(msgspec.Struct):
    """The part of Inspect's `EvalSample` that we read; events are decoded when shown."""

    events: list[msgspec.Raw] = []
    events_data: Pool | None = None
    attachments: dict[str, str] = {}
    store: msgspec.Raw = msgspec.Raw(b"{}")
    started_at: str | None = None
    completed_at: str | None = None


class _Place(msgspec.Struct):
    event: str = ""
    id: str | None = None
    parent_id: str | None = None
    span_id: str | None = None


class _Attachments:
    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts
        self._room = EXPANDED_CHARS

    def into(self, value: Any, depth: int = 0) -> Any:
        """Put texts in the place of their names, as long as there is room."""
        if isinstance(value, str):
            text = self._texts.get(value.removeprefix(ATTACHMENT)) if value.startswith(ATTACHMENT) else None
            if text is None or len(text) > self._room:
                return value
            self._room -= len(text)
            return text
        if not self._texts or depth > MAX_DEPTH:
            return value
        if isinstance(value, dict):
            return {name: self.into(each, depth + 1) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [self.into(each, depth + 1) for each in value]  # pyright: ignore[reportUnknownVariableType]
        return value


_read_transcript = msgspec.json.Decoder(Transcript).decode
_read_place = msgspec.json.Decoder(_Place).decode


def transcript_view(
    ledger: LedgerReader, uuid: str, *, attempt: int | None = None, offset: int = 0
) -> TranscriptView:
    """Return events, by default of the last attempt."""
    number, attempts, attempt = _find_transcript(ledger, uuid, attempt)
    text = ledger.transcript(number, attempt)
    with _one_at_a_time:
        try:
            text = ledger.unpacked(text, limit=TRANSCRIPT_BYTES)
            return _view(attempt, attempts, parsed(text), offset)
        except ValueError as error:
            return TranscriptView(
                attempt=attempt,
                attempts=attempts,
                events=[],
                total=0,
                next=None,
                store="",
                problem=str(error),
                raw=text[: 4 * MAX_RAW_CHARS].decode(errors="replace")[:MAX_RAW_CHARS],
            )


def _find_transcript(
    ledger: LedgerReader, uuid: str, attempt: int | None = None
) -> tuple[int, list[int], int]:
    number = ledger.number("SELECT sequence FROM episodes WHERE uuid = ?", (uuid,))
    attempts = ledger.transcribed(int(number)) if number is not None else []
    if number is None or not attempts or attempt not in (None, *attempts):
        wanted = "" if attempt is None else f" of attempt {attempt}"
        raise NotRecordedError(f"there is no transcript{wanted} of the episode {uuid!r}")
    return int(number), attempts, attempts[-1] if attempt is None else attempt


def parsed(text: bytes) -> Transcript:
    """Raises ValueError."""
    try:
        return _read_transcript(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not Inspect's: {error}") from error


def _view(attempt: int, attempts: list[int], transcript: Transcript, offset: int) -> TranscriptView:
    places = list(_places(transcript.events[:MAX_EVENTS]))
    shown = places[offset : offset + EVENTS_PER_PAGE]
    first = _value(transcript.events[0]).get("timestamp") if transcript.events else None
    attachments = _Attachments(transcript.attachments)
    store = bytes(transcript.store)
    end = offset + len(shown)
    return TranscriptView(
        attempt=attempt,
        attempts=attempts,
        events=[_event(transcript, attachments, at, depth, first) for at, depth in shown],
        total=len(places),
        next=end if end < len(places) else None,
        store="" if store in (b"{}", b"null") else _text(_decoded(store)),
        problem=None,
        raw="",
    )


def _places(events: list[msgspec.Raw]) -> Iterator[tuple[int, int]]:
    depths: dict[str, int] = {}
    for at, event in enumerate(events):
        try:
            place = _read_place(event)
        except (msgspec.DecodeError, RecursionError):
            place = _Place()
        if place.event == "span_end":
            continue
        inside = place.parent_id if place.event == "span_begin" else place.span_id
        depth = min(depths.get(inside or "", -1) + 1, MAX_DEPTH)
        if place.event == "span_begin" and place.id is not None:
            depths[place.id] = depth
        yield at, depth


def _event(
    transcript: Transcript, attachments: _Attachments, at: int, depth: int, first: Any
) -> TimelineEvent:
    value: dict[str, Any] = attachments.into(_value(transcript.events[at]))
    kind = str(value.get("event") or "unknown")[:40]
    title, parts = _summary(kind, value, transcript, attachments)
    return TimelineEvent(
        kind=kind,
        title=title[:LABEL_CHARS],
        depth=depth,
        seconds=_seconds(first, value.get("timestamp")),
        took_s=_number(value.get("working_time")),
        failed=kind == "error" or bool(value.get("error")),
        parts=[
            Part(label=label[:LABEL_CHARS], text=_text(text))
            for label, text in parts
            if text not in (None, "", [], {})
        ],
    )


def _summary(
    kind: str, value: dict[str, Any], transcript: Transcript, attachments: _Attachments
) -> tuple[str, list[tuple[str, Any]]]:
    match kind:
        case "model":
            return _model_call(value, transcript, attachments)
        case "tool":
            given = [(name, value.get(name)) for name in ("arguments", "result")]
            return str(value.get("function")), [*given, ("error", _message_of(value.get("error")))]
        case "score":
            score = _object(value.get("score"))
            said = [(name, score.get(name)) for name in ("answer", "explanation", "metadata")]
            return f"{value.get('scorer') or 'score'}: {_text(score.get('value'))}", said
        case "store" | "state":
            changes = [_object(change) for change in _items(value.get("changes"))]
            paths = ", ".join(str(change.get("path")) for change in changes)
            return paths, [(f"{c.get('op')} {c.get('path')}", c.get("value")) for c in changes]
        case "sandbox":
            parts = [
                (name, value.get(name)) for name in ("cmd", "file", "input", "options", "result", "output")
            ]
            return f"{value.get('action')} {value.get('cmd') or value.get('file') or ''}", parts
        case "error":
            error = _object(value.get("error"))
            return str(error.get("message")), [("traceback", error.get("traceback"))]
        case "span_begin":
            names = dict.fromkeys(str(value.get(each) or "") for each in ("type", "name"))
            return " ".join(names).strip() or "span", []
        case "sample_limit":
            return f"{value.get('type')} limit: {value.get('message')}", []
        case "logger":
            message = _object(value.get("message"))
            return f"{message.get('level')}: {message.get('message')}", []
        case "info":
            return str(value.get("source") or ""), [("", value.get("data"))]
        case _:
            rest = {name: each for name, each in value.items() if name not in _ABOUT}
            return "", [("", rest)]


_ABOUT = frozenset(
    {
        "event",
        "uuid",
        "span_id",
        "timestamp",
        "working_start",
        "pending",
        "metadata",
        "working_time",
        "completed",
    }
)


def _model_call(
    value: dict[str, Any], transcript: Transcript, attachments: _Attachments
) -> tuple[str, list[tuple[str, Any]]]:
    output = _object(value.get("output"))
    choices = [_object(choice) for choice in _items(output.get("choices"))]
    number, messages = _prompt(value, transcript, attachments)
    asked = "".join(f"{m.get('role')}: {_message_text(m.get('content'))}\n" for m in messages)
    label = f"prompt, the last {len(messages)} of {number} messages" if number > len(messages) else "prompt"
    parts: list[tuple[str, Any]] = [(label, asked)]
    for choice in choices:
        message = _object(choice.get("message"))
        parts.append(("reply", _message_text(message.get("content"))))
        for call in _items(message.get("tool_calls")):
            parts.append((f"calls {_object(call).get('function')}", _object(call).get("arguments")))
        if choice.get("stop_reason") not in ("stop", "tool_calls", None):
            parts.append(("stopped by", choice.get("stop_reason")))
    parts.append(("error", value.get("error") or output.get("error")))
    usage = _object(output.get("usage"))
    tokens = f", {usage['output_tokens']} tokens" if "output_tokens" in usage else ""
    return f"{value.get('model')}{tokens}", parts


def _prompt(
    value: dict[str, Any], transcript: Transcript, attachments: _Attachments
) -> tuple[int, list[dict[str, Any]]]:
    pool = transcript.events_data.messages if transcript.events_data else []
    given = _items(value.get("input"))
    pooled: list[range] = []
    for pair in _items(value.get("input_refs")):
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(end, int) for end in pair):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            pooled.append(range(len(pool))[slice(*pair)])  # pyright: ignore[reportUnknownArgumentType]
    number = len(given) + sum(map(len, pooled))
    last = [at for span in pooled[-LAST_MESSAGES:] for at in span[-LAST_MESSAGES:]]
    messages = [*map(_object, given[-LAST_MESSAGES:]), *(_value(pool[at]) for at in last)]
    return number, [attachments.into(each) for each in messages[-LAST_MESSAGES:]]


def _message_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [_object(part) for part in _items(content)]
    return "\n".join(_text(part.get("text") or part.get("reasoning") or part) for part in parts)


def _message_of(error: Any) -> Any:
    return error.get("message") if isinstance(error, dict) else error  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _decoded(text: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return bytes(text[:SHOWN_CHARS_OF_MESSAGE]).decode(errors="replace")


def _value(text: msgspec.Raw) -> dict[str, Any]:
    found = _decoded(text)
    return found if isinstance(found, dict) else {"value": found}  # pyright: ignore[reportUnknownVariableType]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode()
    more = len(text) - SHOWN_CHARS_OF_MESSAGE
    return text if more <= 0 else f"{text[:SHOWN_CHARS_OF_MESSAGE]}… ({more} more characters)"


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _seconds(first: Any, at: Any) -> float | None:
    try:
        return (datetime.fromisoformat(at) - datetime.fromisoformat(first)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return None
