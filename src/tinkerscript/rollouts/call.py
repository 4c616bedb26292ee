"""`Call`: the immutable record of one model call.

A call stores its parent's id and only the ids that are new, so a conversation of n turns stores each token
once. Ids are little-endian int32 bytes and logprobs little-endian float32 bytes: the same bytes travel over
the link, are kept in the store, and are read as numpy arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

FOREIGN_POLICY = -1
"""Policy version of weights that the trainer never published: their samples do not train."""

StopReason = Literal["stop", "length"]
"""`stop`: the last sampled token ended the turn. `length`: the token limit did."""

LogprobKind = Literal["processed", "raw", "unknown"]
"""`processed`: of the distribution that was sampled from, after temperature, before top-p and top-k. `raw`:
at temperature 1, regardless of the sampling temperature."""


class TokenConstraint(IntEnum):
    """What a grammar did to the choice of one sampled token."""

    NONE = 0
    """Nothing: every token with a probability above 0 was allowed."""

    CUT = 1
    """Several tokens were allowed, and others with a probability above 0 were not."""

    FORCED = 2
    """This token was the only one allowed."""

    UNKNOWN = 3
    """A grammar was in force, and the server does not tell where."""


MatchedBy = Literal["ids", "equality"]
"""How a call's parent was found. `ids`: the request's last assistant message carries the id of a reply we
sent, with the same content. `equality`: by message content alone."""


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hash a vocabulary (piece -> id) to 16 hex digits."""
    digest = hashlib.sha256()
    for piece, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\0{piece}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def pack_ids(ids: Sequence[int] | IntArray) -> bytes:
    """Pack token ids [N] into little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """View little-endian int32 bytes as token ids [N] (read-only)."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | FloatArray) -> bytes:
    """Pack logprobs [N] into little-endian float32 bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> FloatArray:
    """View little-endian float32 bytes as logprobs [N] (read-only)."""
    return np.frombuffer(data, dtype="<f4")


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One model call, exactly as it was sampled. Encoded without the names of its fields."""

    call_id: str
    parent_id: str | None
    """The call whose prompt and sampled ids are the start of this prompt; None for a new prompt."""

    matched_by: MatchedBy | None = None
    """How the parent was found; None for a new prompt."""

    new_prompt: bytes
    """Prompt ids (int32) that follow the parent's prompt and sampled ids."""

    sampled: bytes
    """Sampled ids (int32), including the stop token if one was sampled."""

    logprobs: bytes
    """Log probability of each sampled id (float32)."""

    stop_reason: StopReason
    policy_version: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one's probability were left out; 0: none."""

    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens that the prompt or the reply already has; 1: none."""

    logprob_kind: LogprobKind = "processed"
    policy_version_end: int | None = None
    """Policy version of the last token if the weights changed during the call, else None."""

    seed: int | None = None
    """Sampling seed; None if unknown."""

    constrained: bytes = b""
    """What a grammar did to each sampled id (uint8 `TokenConstraint`); empty without a grammar. `logprobs`
    are of the distribution before the grammar, except where that is unknown too (`logprob_kind`)."""

    ids_from: str = "sampler"
    """Origin of `sampled`: the sampler itself, or a field of a server's reply (`inference_ctx.IdsSource`)."""

    prompt_from: Literal["server", "client"] = "server"
    """Who rendered the prompt ids. `client`: they may differ from what the server saw."""

    tokenizer: str = ""
    """Fingerprint of the tokenizer that rendered the prompt (`vocabulary_fingerprint`); empty if unknown."""

    fork_reason: str | None = None
    """Why this prompt does not extend an earlier call, where one would expect it to."""

    messages: str = "[]"
    """JSON list of the messages new in this prompt, for display and for resuming after a restart. Empty for a
    later choice of a request: `with_messages` gives it those of the first, which holds them for all."""

    reply: str = "{}"
    """JSON of the assistant message returned, for display and for resuming after a restart."""

    tools: str = "[]"
    """JSON list of a new prompt's tools; a call with a parent has the same tools as its parent. Empty where
    `messages` are."""

    created: int = 0
    """Unix time in seconds when the request arrived; 0 for a call not recorded by a gateway."""

    idempotency_key: str = ""
    """The request's `Idempotency-Key`, so that a retry gets this reply even after a restart."""

    request_digest: str = ""
    """Digest of the request that carried the key; empty without one."""

    ignored: list[str] = []
    """Fields of the request that were accepted without effect, in the gateway's agent mode."""

    side: bool = False
    """Whether an agent made it beside its work, such as for a title."""

    role: str = ""
    """The role of the run that was called; empty for the policy. Calls of a frozen or outside role never
    train."""

    reported_tokens: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the reply, as a server that gives no ids counted them; else 0."""

    spans: list[tuple[int, int]] = []
    """(policy version, index of the first id that it sampled), in order, if weights were published during the
    call and went on with it. Empty: `policy_version` sampled all, or where the weights changed is unknown."""

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

    @property
    def size(self) -> int:
        """About how many bytes it takes, wherever it is held."""
        texts = (self.messages, self.reply, self.tools)
        return sum(map(utf8_size, texts)) + sum(
            map(len, (self.new_prompt, self.sampled, self.logprobs, self.constrained))
        )

    @property
    def reply_tokens(self) -> int:
        """How many tokens the reply has."""
        return len(self.sampled) // 4 or self.reported_tokens[1]

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Of all weights that sampled a part of it, as far as it is known: first those of the first token."""
        if self.spans:
            return tuple(version for version, _ in self.spans)
        if self.policy_version_end is None:
            return (self.policy_version,)
        return (self.policy_version, self.policy_version_end)

    @property
    def is_foreign(self) -> bool:
        """Whether a role of weights that do not train was called."""
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
        """Whether a grammar took a choice away from any sampled id."""
        return any(self.constrained)


class Prompts(Mapping[str, bytes]):
    """Full prompts by call id, as int32 bytes. Built on lookup, never stored.

    So n calls of one conversation cost memory for their own tokens, not for n prompts. A lookup is O(prompt).
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        """`calls` must list parents before children.

        Raises ValueError for a missing parent or a duplicate call id.
        """
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
    """How many bytes `text` takes as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def with_messages(calls: Iterable[Call]) -> list[Call]:
    """`calls`, oldest first, each choice with the messages and tools that its request's first one holds."""
    whole = list[Call]()
    for call in calls:
        if not call.messages and whole:  # The choices of a request follow each other.
            first = whole[-1]
            call = msgspec.structs.replace(call, messages=first.messages, tools=first.tools)
        whole.append(call)
    return whole


def calls_of(calls: Iterable[Call], role: str = "") -> list[Call]:
    """The calls of one role, by default the policy's."""
    return [call for call in calls if call.role == role]


def full_prompts(calls: Iterable[Call]) -> Prompts:
    """Map each call id to its full prompt (int32 bytes), in linear memory."""
    return Prompts(calls)


def conversation_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The messages of the last call and of those that it extends, in OpenAI's format, its reply included.

    Empty for calls made with a raw prompt.
    """
    calls = with_messages(calls)
    by_id = {call.call_id: call for call in calls}
    chain: list[Call] = []
    call = calls[-1] if calls else None
    while call is not None:
        chain.append(call)
        call = by_id.get(call.parent_id or "")
    messages: list[dict[str, Any]] = []
    for call in reversed(chain):
        messages += json.loads(call.messages)
        reply = json.loads(call.reply)
        messages += [reply] if reply else []
    return messages
