"""`Call`: the immutable evidence of one model call.

A call stores the id of its parent and only the ids that are new, so that a conversation of n
turns costs its tokens once. Ids are little-endian int32 bytes and logprobs little-endian float32
bytes: the same bytes travel over the link, lie in the store and are read as numpy arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

StopReason = Literal["stop", "length"]
"""`stop`: the last sampled token ends the turn. `length`: the token limit did."""

LogprobKind = Literal["processed", "raw", "unknown"]
"""`processed`: of the distribution that was sampled, after temperature and before top-p and
top-k. `raw`: at temperature 1 whatever was sampled."""


MatchedBy = Literal["ids", "equality"]
"""How a session found a call's parent. `ids`: the request's last assistant message carries an id that we gave
to that reply, and its content agrees. `equality`: by the content of the messages alone."""


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """16 hex digits that differ for vocabularies (piece -> id) that differ in any piece or id."""
    digest = hashlib.sha256()
    for piece, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\0{piece}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def pack_ids(ids: Sequence[int] | IntArray) -> bytes:
    """Token ids [N] as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """Little-endian int32 bytes as token ids [N] (read-only view)."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | FloatArray) -> bytes:
    """Log probabilities [N] as little-endian float32 bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> FloatArray:
    """Little-endian float32 bytes as log probabilities [N] (read-only view)."""
    return np.frombuffer(data, dtype="<f4")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call of one claim, as it was sampled."""

    call_id: str
    parent_id: str | None
    """The call whose prompt and sampled ids this call's prompt starts with; None for a new prompt."""

    matched_by: MatchedBy | None = None
    """How the parent was found; None for a new prompt."""

    new_prompt: bytes
    """Prompt ids after the parent's prompt and sampled ids (int32)."""

    sampled: bytes
    """Sampled ids (int32), the stop token included if one was sampled."""

    logprobs: bytes
    """Log probability of each sampled id (float32)."""

    stop_reason: StopReason
    policy_version: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logprob_kind: LogprobKind = "processed"
    policy_version_end: int | None = None
    """Of the last token, where the weights changed during the call; else None."""

    seed: int | None = None
    """That it was sampled with; None: not known."""

    constrained: bool = False
    """Whether a grammar limited what could be sampled. `logprobs` are those of the free distribution."""

    ids_from: str = "sampler"
    """Where `sampled` came from: the sampler itself, or a place of a server's reply (`choices.SOURCES`)."""

    prompt_from: Literal["server", "client"] = "server"
    """Who rendered the prompt's ids. `client`: they may differ from what the server sampled after."""

    tokenizer: str = ""
    """Fingerprint of the tokenizer that rendered the prompt (`vocabulary_fingerprint`); empty if unknown."""

    break_cause: str | None = None
    """Why this prompt does not extend an earlier call, where one might expect it to."""

    messages: str = "[]"
    """JSON list of the messages that are new in this prompt: for people, and to go on after a restart."""

    reply: str = "{}"
    """JSON of the assistant message that was answered: for people, and to go on after a restart."""

    tools: str = "[]"
    """JSON list of the tools of a new prompt; a call with a parent has the tools of its parent."""

    created: int = 0
    """Unix time in seconds when the request came; 0 for a call that no gateway recorded."""

    idempotency_key: str = ""
    """The request's `Idempotency-Key`, so that a repeated request gets this answer after a restart too."""

    request_digest: str = ""
    """Digest of the request that carried the key; "" without one."""

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.logprobs):
            raise ValueError(
                f"call {self.call_id}: {len(self.sampled) // 4} sampled ids, "
                f"{len(self.logprobs) // 4} logprobs"
            )

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Of the first token and, where the weights changed meanwhile, of the last."""
        if self.policy_version_end is None:
            return (self.policy_version,)
        return (self.policy_version, self.policy_version_end)

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


class Prompts(Mapping[str, bytes]):
    """The whole prompt of each call, by call id, as int32 bytes: made when it is asked for, kept nowhere.

    So n calls of one conversation cost their own tokens, not n prompts. Looking one up is O(prompt).
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        """`calls` must name parents before children.

        Raises ValueError for a call whose parent is not there, or a second call of one id.
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


def full_prompts(calls: Iterable[Call]) -> Prompts:
    """The whole prompt of each call, by call id, as int32 bytes, in linear memory (`Prompts`)."""
    return Prompts(calls)
