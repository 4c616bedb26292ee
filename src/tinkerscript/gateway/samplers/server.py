"""`InferenceServer`: one kind of server that samples for us, behind the words that all of them share.

`Ask` goes out, `Answer`s come back. The invariant: ids and log probabilities are what the server reported,
one log probability for each id; nothing is derived from text, and what contradicts itself is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import StopReason

IdsFrom = Literal["token_ids", "token_id strings", "output_token_logprobs"]
"""The place of a reply from which sampled ids are read."""

T = TypeVar("T")

NOT_FINITE = float("nan")
"""Stands for a log probability that the server sent as null: JSON has neither -inf nor NaN."""


class MissingIdsError(GatewayError):
    """A reply without the ids that were sampled. `remedy` names the flag or version that helps."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(502, "engine_error", f"{message}; {remedy}")
        self.remedy = remedy


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a server; lengths are in tokens."""

    prompt: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    top_logprobs: int = 0
    """Most likely tokens that are reported for each position, beside the sampled one."""

    score_from: int | None = None
    """Report the log probabilities of the prompt's tokens from this position on."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence, as the server reported it."""

    ids: list[int]
    logprobs: list[float]
    """One for each id. -9999.0 and NaN stand for what the server could not send."""

    stop_reason: StopReason
    ids_from: IdsFrom
    top: list[dict[int, float]] = []
    """The most likely ids of each position, if they were asked for."""

    scores: list[float] = []
    """Log probabilities of the prompt's tokens from `Ask.score_from` on, at temperature 1."""

    weight_version: str | None = None
    """The server's name for the weights that it held when this was done, if it says so with each reply."""

    weight_versions: list[str] = []
    """All weights that sampled this, oldest first, if the server keeps account of that."""


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    models: list[str]
    """Names that requests may use."""

    max_context: int
    """Most tokens of prompt and reply together."""

    version: str = "unknown"
    """Version of the server's software."""

    weight_version: str | None = None
    """The server's name for the weights that it holds; None if it has none."""


class InferenceServer(ABC):
    """A server that takes token ids and gives token ids. The wire format is the subclass's."""

    kind: str
    """`vllm` or `sglang`."""

    url: str
    remedies: dict[str, str]
    """What helps, by what was missing or amiss: `ids`, `stop`, `logits`, `wrong`, `seed`."""

    @abstractmethod
    async def describe(self) -> ServerDescription:
        """Raises GatewayError."""

    @abstractmethod
    async def ask(self, ask: Ask, model: str) -> list[Answer]:
        """`ask.n` sequences, in order.

        Raises MissingIdsError; GatewayError 400 for what the server refuses, 502 for a reply that contradicts
        itself or the request, 503 and 504 for one that did not come.
        """

    @abstractmethod
    async def weight_version(self) -> str | None:
        """The server's name for the weights that it holds now; None if it has none. Raises GatewayError."""

    @abstractmethod
    async def encode(self, text: str, model: str) -> list[int] | None:
        """Ids of `text` by the server's own tokenizer; None if it does not tell. Raises GatewayError."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""


def contradiction(message: str) -> GatewayError:
    """A reply that cannot be recorded as what was sampled."""
    return GatewayError(502, "engine_error", f"the inference server's reply cannot be used: {message}")


def check_lengths(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raises GatewayError 502."""
    if len(ids) != len(logprobs):
        raise contradiction(f"{len(ids)} sampled ids, {len(logprobs)} log probabilities")


def check_prompt(sent: Sequence[int], used: Sequence[int] | None, count: int | None) -> None:
    """The server must have sampled after exactly the prompt that was sent. Raises GatewayError 502."""
    if used is not None and list(used) != list(sent):
        raise contradiction(
            f"it sampled after another prompt than the one sent ({len(used)} ids for {len(sent)})"
        )
    if count is not None and count != len(sent):
        raise contradiction(f"it counts {count} prompt tokens where {len(sent)} were sent")


def agreed(sources: dict[IdsFrom, list[int] | None]) -> tuple[IdsFrom, list[int]] | None:
    """The first source that has ids, if all that have some agree. Raises GatewayError 502."""
    found: list[tuple[IdsFrom, list[int]]] = [(name, ids) for name, ids in sources.items() if ids is not None]
    if not found:
        return None
    name, ids = found[0]
    for other, others in found[1:]:
        if others != ids:
            raise contradiction(f"its ids in {name} and in {other} differ")
    return name, ids


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as JSON of the form `kind`. Raises GatewayError 502."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise contradiction(f"it is not of the form we know ({error})") from error
