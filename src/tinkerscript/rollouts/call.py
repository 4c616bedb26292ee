"""`Call`: the immutable record of one model call.

A call stores its parent's id and only its new ids, so a conversation stores each token once. Ids are
little-endian int32 bytes, logprobs float32, and are never converted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# Weights that the trainer never published, which never train.
FOREIGN_POLICY = -1

# Bytes per token; DeepSeek V3 has 928.
MAX_EXPERTS = 4096

StopReason = Literal["stop", "length"]
"""`stop`: the last sampled token ended the turn. `length`: the token limit did."""

LogprobKind = Literal["processed", "raw", "unknown"]
"""`processed`: after temperature, before top-p and top-k. `raw`: at temperature 1."""


class TokenConstraint(IntEnum):
    NONE = 0
    """Every token with a probability above 0 was allowed."""

    CUT = 1
    """Several, but not all possible, tokens were allowed."""

    FORCED = 2
    UNKNOWN = 3
    """A grammar was used, but the server does not report where."""


MatchedBy = Literal["ids", "equality"]
"""`ids`: the request's last assistant message has the id and content of our reply. `equality`: a call was
found by message content alone.
"""


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hash a vocabulary (piece -> id) to 16 hex digits."""
    digest = hashlib.sha256()
    for piece, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\0{piece}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def pack_ids(ids: Sequence[int] | IntArray) -> bytes:
    """Pack ids [N] as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """Return a read-only view [N]."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | FloatArray) -> bytes:
    """Pack logprobs [N] as little-endian float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> FloatArray:
    """Return a read-only view [N]."""
    return np.frombuffer(data, dtype="<f4")


class PlacedImage(NamedTuple):
    start: int
    """Index of its first placeholder id."""

    data: bytes
    """The file as the client sent it; in a ledger's call, its digest."""


def moved_images(images: Iterable[PlacedImage], by: int) -> list[PlacedImage]:
    return [PlacedImage(image.start + by, image.data) for image in images]


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One model call, exactly as sampled. Encoded as an array."""

    call_id: str
    parent_id: str | None
    """The call that this prompt continues; None for a new prompt."""

    matched_by: MatchedBy | None = None
    new_prompt: bytes
    """Prompt ids (int32) after the parent's tokens."""

    sampled: bytes
    """Sampled ids (int32), including a sampled stop token."""

    logprobs: bytes
    """float32 per sampled id."""

    stop_reason: StopReason
    policy_version: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    """Share of the most probable token's probability below which none is sampled. 0: off."""

    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens that already occurred. 1: off."""

    logprob_kind: LogprobKind = "processed"
    policy_version_end: int | None = None
    """Policy version of the last token, if the weights changed during the call."""

    seed: int | None = None
    constrained: bytes = b""
    """`TokenConstraint` of each sampled id (uint8); empty without a grammar. `logprobs` are from before the
    grammar, unless `logprob_kind` is unknown.
    """

    ids_from: str = "sampler"
    """Where `sampled` is from (`inference_ctx.IdsSource`)."""

    prompt_from: Literal["server", "client"] = "server"
    """Who rendered the prompt; a client's ids may differ from the server's."""

    tokenizer: str = ""
    """`vocabulary_fingerprint` of the prompt's tokenizer, if known."""

    fork_reason: str | None = None
    """Why this prompt unexpectedly does not extend an earlier call."""

    messages: str = "[]"
    """JSON list of the prompt's new messages; empty in later choices of a request."""

    reply: str = "{}"
    tools: str = "[]"
    """JSON list of a new prompt's tools. Empty where `messages` is."""

    created: int = 0
    """Unix time of the request in seconds; 0 without a gateway."""

    idempotency_key: str = ""
    """A retry with the request's `Idempotency-Key` gets this reply, even after a restart."""

    request_digest: str = ""
    ignored: list[str] = []
    """Fields of the request without effect, in the gateway's agent mode."""

    side: bool = False
    """Whether an agent made the call outside of its work, such as for a title."""

    role: str = ""
    """Empty for the policy. Frozen and outside roles never train."""

    reported_tokens: tuple[int, int] = (0, 0)
    """Tokens of prompt and reply, from a server that returns no ids."""

    spans: list[tuple[int, int]] = []
    """(policy version, index of its first id), in order, if weights changed during the call. Empty:
    `policy_version` sampled everything, or it is unknown.
    """

    experts: bytes = b""
    """A mixture's experts, for each id of `new_prompt` and `sampled`: the routers' choices at the position
    before it. Ids [layers, k], uint8 (int16 from 256 experts on), all bits set where unknown. Empty: not
    recorded.
    """

    images: list[PlacedImage] = []
    """Images of `new_prompt`, in order."""

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.logprobs):
            raise ValueError(
                f"call {self.call_id}: {len(self.sampled) // 4} sampled ids, "
                f"{len(self.logprobs) // 4} logprobs"
            )
        if self.constrained and (
            4 * len(self.constrained) != len(self.sampled) or max(self.constrained) > max(TokenConstraint)
        ):
            raise ValueError(
                f"call {self.call_id}: `constrained` needs one of {[*map(int, TokenConstraint)]} for each of "
                f"the {len(self.sampled) // 4} sampled ids, got {list(self.constrained)}"
            )

        tokens = self.new_tokens
        if self.experts and (len(self.experts) % (tokens or 1) or len(self.experts) > MAX_EXPERTS * tokens):
            raise ValueError(
                f"call {self.call_id}: `experts` needs the same number of bytes for each of {tokens} ids, "
                f"at most {MAX_EXPERTS}, and has {len(self.experts)} in all"
            )

    @property
    def size(self) -> int:
        texts = (self.messages, self.reply, self.tools)
        parts = (self.new_prompt, self.sampled, self.logprobs, self.constrained, self.experts)
        images = (image.data for image in self.images)
        return sum(map(utf8_size, texts)) + sum(map(len, (*parts, *images)))

    @property
    def new_tokens(self) -> int:
        return (len(self.new_prompt) + len(self.sampled)) // 4

    @property
    def reply_tokens(self) -> int:
        return len(self.sampled) // 4 or self.reported_tokens[1]

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """All known versions that sampled a part, the first token's first."""
        if self.spans:
            return tuple(version for version, _ in self.spans)
        if self.policy_version_end is None:
            return (self.policy_version,)
        return (self.policy_version, self.policy_version_end)

    @property
    def is_foreign(self) -> bool:
        """Whether the call's role never trains."""
        return bool(self.role) and self.policy_version == FOREIGN_POLICY

    @property
    def new_prompt_ids(self) -> IntArray:
        """int32 [D]"""
        return unpack_ids(self.new_prompt)

    @property
    def sampled_ids(self) -> IntArray:
        """int32 [R]"""
        return unpack_ids(self.sampled)

    @property
    def sampled_logprobs(self) -> FloatArray:
        """float32 [R]"""
        return unpack_logprobs(self.logprobs)

    @property
    def is_constrained(self) -> bool:
        return any(self.constrained)


class Prompts(Mapping[str, bytes]):
    """Full prompts by call id, as int32 bytes. To save memory, a look-up builds them."""

    def __init__(self, calls: Iterable[Call]) -> None:
        """Parents come before children. Raises ValueError for missing parents and duplicate ids."""
        self._calls: dict[str, Call] = {}
        for call in calls:
            if call.parent_id is not None and call.parent_id not in self._calls:
                raise ValueError(
                    f"call {call.call_id}: its parent {call.parent_id} is not among the calls before it"
                )
            if call.call_id in self._calls:
                raise ValueError(f"two calls have the id {call.call_id}")
            self._calls[call.call_id] = call

    def __getitem__(self, call_id: str) -> bytes:
        call = self._calls[call_id]
        parts = [call.new_prompt]
        while call.parent_id is not None:
            call = self._calls[call.parent_id]
            parts += (call.sampled, call.new_prompt)
        return b"".join(reversed(parts))

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def with_messages(calls: Iterable[Call]) -> list[Call]:
    """Return `calls`, oldest first, with the messages and tools of each request in all its choices."""
    whole = list[Call]()
    for call in calls:
        if not call.messages and whole:  # A request's choices are consecutive.
            first = whole[-1]
            call = msgspec.structs.replace(call, messages=first.messages, tools=first.tools)
        whole.append(call)
    return whole


def calls_of(calls: Iterable[Call], role: str = "") -> list[Call]:
    return [call for call in calls if call.role == role]


def full_prompts(calls: Iterable[Call]) -> Prompts:
    return Prompts(calls)


def conversation_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Messages of the last call and the calls it extends, with its reply, in OpenAI's format."""
    calls = with_messages(calls)
    by_id = {call.call_id: call for call in calls}
    chain: list[Call] = []
    call = calls[-1] if calls else None
    while call is not None:
        chain.append(call)
        call = by_id.get(call.parent_id or "")
    messages: list[dict[str, Any]] = []
    for call in reversed(chain):
        images = iter(call.images)
        messages += [_with_parts(message, images) for message in json.loads(call.messages)]
        reply = json.loads(call.reply)
        messages += [reply] if reply else []
    return messages


def _with_parts(message: dict[str, Any], images: Iterator[PlacedImage]) -> dict[str, Any]:
    """Add the message's images, which come next in `images`."""
    content, begin = message["content"], 0
    parts: list[dict[str, Any]] = []
    for image in message.pop("images", ()):
        parts.append({"type": "text", "text": content[begin : image["at"]]})
        url = f"data:{_media_type(data := next(images).data)};base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
        begin = image["at"]
    if not parts:
        return message
    parts.append({"type": "text", "text": content[begin:]})
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _media_type(data: bytes) -> str:
    if data.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if data.startswith(b"RIFF") else "image/jpeg"
