"""`StreamedReply` turns the progress of a sample into events.

Everything sent is a prefix of the record's ids and text, or the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tinkerscript.asgi import COMMENT_EVERY_S, KEEP_ALIVE, Caller
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.dialect import Choice, Completion, EventStream, MessageDelta
from tinkerscript.gateway.partial_reply import PartialReply
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.sampler import Progress, SampledTokens, SampleResult

logger = logging.getLogger(__name__)

_FIELDS = ("sampled", "logprobs", "top_ids", "top_logprobs")


class _StreamedChoice:
    __slots__ = ("_content", "_hidden", "_ids", "_message", "_pending", "_reasoning", "_texts")

    def __init__(self, message: PartialReply | None, hidden: frozenset[int]) -> None:
        self._hidden = hidden
        self._content = list[str]()
        self._reasoning = list[str]()
        self._message = message
        self._ids = bytearray()
        self._pending = {name: bytearray() for name in _FIELDS}
        self._texts: list[tuple[str, str]] = []

    @property
    def sent(self) -> int:
        return (len(self._ids) - len(self._pending["sampled"])) // 4

    def take(self, report: Progress) -> bool:
        """Return False if the report contradicts an earlier one."""
        known = len(self._ids) // 4 - report.offset
        if known < 0:
            return True
        agrees = self._ids.startswith(report.sampled[: 4 * known], 4 * report.offset)
        self._ids += report.sampled[4 * known :]
        for name, data in report.span(known).items():
            self._pending[name] += data
        return agrees

    def add_text(self, reasoning: str, content: str) -> None:
        self._texts.append((reasoning, content))

    def take_text(self, index: int) -> list[MessageDelta]:
        texts, self._texts = self._texts, []
        self._reasoning += [reasoning for reasoning, _ in texts]
        self._content += [content for _, content in texts]
        return [MessageDelta(index=index, content=content, reasoning=text) for text, content in texts]

    def news(self, index: int) -> MessageDelta | None:
        if self._message is None or not self._pending["sampled"]:
            return None
        tokens = {name: bytes(data) for name, data in self._pending.items()}
        for data in self._pending.values():
            data.clear()
        ids = unpack_ids(tokens["sampled"]).tolist()
        reasoning, content = self._message.feed([token for token in ids if token not in self._hidden])
        self._reasoning.append(reasoning)
        self._content.append(content)
        return MessageDelta(index=index, content=content, reasoning=reasoning, **tokens)

    def rest(self, index: int, choice: Choice) -> MessageDelta | None:
        content = _after("".join(self._content), choice.message["content"])
        reasoning = _after("".join(self._reasoning), choice.message.get("reasoning_content", ""))
        tokens = choice.span(self.sent)
        if not (content or reasoning or tokens["sampled"]):
            return None
        return MessageDelta(index=index, content=content, reasoning=reasoning, **tokens)

    def is_prefix_of(self, tokens: SampledTokens) -> bool:
        return tokens.sampled.startswith(bytes(self._ids[: 4 * self.sent]))


class StreamedReply:
    def __init__(
        self,
        events: EventStream,
        messages: Sequence[PartialReply | None],
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        self._events = events
        self._choices = [_StreamedChoice(message, hidden) for message in messages]
        self._diverged = False
        self._wake = asyncio.Event()

    async def follow(self, work: asyncio.Future[Any], caller: Caller) -> None:
        """Send news until `work` ends or the caller disconnects.

        Raises GatewayError 503 if the engine restarts a sample that was partly sent.
        """
        disconnected = caller.disconnected()

        def wake(_: asyncio.Future[Any]) -> None:
            self._wake.set()

        for each in (work, disconnected):
            each.add_done_callback(wake)
        try:
            while not (work.done() or disconnected.done()):
                await self._send_news(caller)
        finally:
            disconnected.remove_done_callback(wake)

    def add_text(self, reasoning: str, content: str) -> None:
        self._choices[0].add_text(reasoning, content)
        self._wake.set()

    def report(self, report: Progress) -> None:
        if not 0 <= report.index < len(self._choices) or len(report.sampled) != len(report.logprobs):
            logger.warning("progress.drop index=%d bytes=%d", report.index, len(report.sampled))
            return
        # A restarted engine samples anew.
        self._diverged |= not self._choices[report.index].take(report)
        self._wake.set()

    def start(self) -> bytes:
        return self._events.start()

    def finish(self, completion: Completion) -> bytes:
        rest: list[MessageDelta | None] = []
        for index, (streamed, choice) in enumerate(zip(self._choices, completion.choices, strict=True)):
            rest += [*streamed.take_text(index), streamed.rest(index, choice)]
        return self._written(rest) + self._events.finish(completion)

    def failure(self, error: GatewayError) -> bytes:
        return self._events.failure(error)

    async def _send_news(self, caller: Caller) -> None:
        try:
            async with asyncio.timeout(COMMENT_EVERY_S):
                await self._wake.wait()
        except TimeoutError:
            await caller.send_events(KEEP_ALIVE if caller.streaming else self.start())
            return
        self._wake.clear()
        if self._diverged:
            raise _restarted()
        news = self._written(
            [
                delta
                for index, choice in enumerate(self._choices)
                for delta in (*choice.take_text(index), choice.news(index))
            ]
        )
        if news:
            await caller.send_events(news if caller.streaming else self.start() + news)

    def _written(self, deltas: Sequence[MessageDelta | None]) -> bytes:
        return b"".join(self._events.delta(delta) for delta in deltas if delta)

    def check(self, results: Sequence[SampleResult]) -> None:
        sequences = [sequence for result in results for sequence in result.sequences]
        for choice, sequence in zip(self._choices, sequences, strict=False):
            if not choice.is_prefix_of(sequence):
                raise _restarted()


def _after(sent: str, text: str) -> str:
    if not text.startswith(sent):
        logger.error("stream.mismatch sent=%r text=%r", sent[-80:], text[:200])
        message = "the text that was streamed is not the text that was sampled (a bug in this server)"
        raise GatewayError(500, "stream_mismatch", message)
    return text[len(sent) :]


def _restarted() -> GatewayError:
    message = "the engine restarted this sample after tokens of it had been sent; retry"
    return GatewayError(503, "engine_restarted", message)
