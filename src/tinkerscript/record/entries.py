"""What is recorded: episodes with the calls of every attempt, and each token's part in training.

Invariant: nothing here is read back by training. Arrays are little-endian bytes, one element for each sampled
token of a sequence, in order, so that they line up with `Rollout.sampled`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar

import msgspec
import zstandard

from tinkerscript.rollouts.call import Call, calls_of

T = TypeVar("T")

ENTRY_LEVEL = 1
"""Of zstd: logprobs barely compress at any level."""

MAX_UNPACKED_BYTES = 256 * 2**20
"""Of an episode's calls, or of its tokens in one step."""

QUEUED = "queued_s"
"""Name of the figure: seconds that an episode waited for the claim that counts."""

PREVIEW_CHARS = 160
MAX_INDEXED_CHARS = 65_536
"""Of an episode's text, for the search."""


class TokenUse(IntEnum):
    """What a training step did with a sampled token."""

    TRAINED = 0
    CONSTRAINED = 1
    """It carries no loss: a grammar constrained its choice (`training.constrained_tokens`)."""

    CORRECTED = 2
    """It carries no loss: sampler and trainer differ too much (`training.rollout_correction`)."""

    LEFT_OUT = 3
    """Its sequence did not train; `TrainedSequence.reason` says why."""


class EpisodeDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode leaves besides its row."""

    calls: list[Call] = []
    """Of the attempt that counts, and of every role."""

    failed_calls: dict[int, list[Call]] = {}
    """Attempt -> the calls of one that failed. They never train."""

    failures: list[dict[str, Any]] = []
    """One for each failed attempt."""

    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    chat: bytes = b""
    """int32 [T]: the tokens of a chat of supervised fine-tuning, which has no calls."""

    chat_trained: bytes = b""
    """uint8 [T]: 1 at the tokens of the chat that train."""

    def size(self) -> int:
        """About how many bytes of memory it takes."""
        attempts = [self.calls, *self.failed_calls.values()]
        return 5 * len(self.chat) // 4 + sum(call.size for call in chain.from_iterable(attempts))


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that ended."""

    uuid: str
    episode_type: str
    step: int
    """The training step that it is for, or that an evaluation follows; 0: before the first, or unknown."""

    label: str = ""
    """Of an evaluation: `before`, `step-5`, `after`; empty for training."""

    group_id: str
    task: str = ""
    sample: dict[str, Any] | None = None
    """The Inspect sample as JSON; None for a client's own."""

    status: str
    """`accepted`, `failed` or `cancelled`."""

    reward: float | None = None
    is_success: bool | None = None
    attempt: int = 0
    """The one that counts; of a failed episode, the last."""

    client_uuid: str = ""
    queued_s: float | None = None
    """Seconds that it waited for the claim that counts; None: no queue, or unknown."""

    ended: float
    """Unix time in seconds."""

    detail: EpisodeDetail


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did with one sequence of S sampled tokens; arrays may be empty: not recorded."""

    number: int
    """Of the sequence within its episode and role, from 0, as `merge_calls` orders them."""

    role: str = ""
    """Whose policy sampled it: that of a role that trains; empty: the run's own."""

    trainer_logprobs: bytes = b""
    """float32 [S]: the trainer's, before the step's first update."""

    entropies: bytes = b""
    """float16 [S]: of the trainer's distribution at each token, in nats."""

    advantages: bytes = b""
    """float32 [S], or [1] if they are all equal: what the loss was given, before it was averaged."""

    uses: bytes = b""
    """uint8 [S], or [1] if they are all equal: `TokenUse`."""

    reason: str = ""
    """Why the sequence did not train; empty if it did."""

    def size(self) -> int:
        """About how many bytes of memory it takes."""
        return len(self.trainer_logprobs) + len(self.entropies) + len(self.advantages) + len(self.uses)


class TrainedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did with one episode."""

    uuid: str
    outcome: str
    """`trained`, or why not: `same_reward`, `group_too_small`, `stale`, `misaligned`, `stopped` (the step, by
    misalignment), `nothing_to_train`."""

    advantage: float | None = None
    sequences: list[TrainedSequence] = []


_pack = msgspec.msgpack.Encoder().encode


def packed(value: object) -> bytes:
    """`value`, made of these, as compressed msgpack."""
    return zstandard.ZstdCompressor(level=ENTRY_LEVEL).compress(_pack(value))


def unpacked(data: bytes, kind: type[T]) -> T:
    """What `packed` packed. A record may be from elsewhere: anything but a `kind` of at most
    `MAX_UNPACKED_BYTES` raises ValueError."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_UNPACKED_BYTES:
            raise ValueError(
                f"{size} bytes are packed, and at most {MAX_UNPACKED_BYTES} are taken (-1: it does not say)"
            )
        # A second frame behind the first is not looked at.
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data), type=kind)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a packed {getattr(kind, '__name__', kind)}: {error}") from error


# An episode as a row of `episodes`


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
        "figures": json.dumps(_figures(episode)),
    }


def _figures(episode: RecordedEpisode) -> dict[str, float]:
    """The scores, the episode's own metrics and how long it was queued, by name, for filters."""
    detail = episode.detail
    scores = detail.metadata.get("scores")
    found = {f"score/{name}": value for name, value in scores.items()} if isinstance(scores, dict) else {}
    found |= detail.log_metrics
    found |= {} if episode.queued_s is None else {QUEUED: episode.queued_s}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _preview(episode: RecordedEpisode) -> str:
    """The last reply, or why the episode failed."""
    detail = episode.detail
    if episode.status != "accepted" and detail.failures:
        last = detail.failures[-1]
        return _storable(f"{last.get('kind')}: {last.get('message')}"[:PREVIEW_CHARS])
    calls = calls_of(detail.calls)
    words = _reply_text(calls[-1]).split() if calls else []
    return _storable(" ".join(words)[:PREVIEW_CHARS])


def _reply_text(call: Call) -> str:
    """What a call answered, tools that it called included."""
    return " ".join(_texts(json.loads(call.reply) or {}))


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
        parts += [*_texts(json.loads(call.messages or "[]")), _reply_text(call)]
    parts += [str(failure.get("message")) for failure in detail.failures]
    return _storable("\n".join(parts)[:MAX_INDEXED_CHARS])


def _storable(text: str) -> str:
    """The text without lone surrogates, which are not UTF-8."""
    return text.encode("utf-8", "replace").decode()
