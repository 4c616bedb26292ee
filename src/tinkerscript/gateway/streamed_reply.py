"""`StreamedReply`: progress of a sample in, events out.

Invariant: what was told of a choice is a prefix of what is recorded of it, in ids and in text, or the stream
ends with an error. A report that came before, or after a gap, changes nothing; the result fills in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from tinkerscript.asgi.caller import KEEP_ALIVE, KEEP_ALIVE_S, Caller
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects import Choice, Completion, EventStream, MessageDelta
from tinkerscript.gateway.sampler import Progress, ProgressCallback, SampledSequence, SampleResult
from tinkerscript.gateway.streaming import LiveMessage, LiveText
from tinkerscript.rollouts.call import unpack_ids

logger = logging.getLogger(__name__)


class _Choice:
    """What is known of one choice, and how much of it was told."""

    __slots__ = ("_buffers", "content", "message", "reasoning", "told", "top")

    def __init__(self, message: LiveMessage | LiveText, top: int) -> None:
        """`top`: alternatives of each position."""
        self.message = message
        self.top = top
        self.told = 0
        """Tokens that went into deltas."""

        self.content = list[str]()
        """Content told so far."""

        self.reasoning = list[str]()
        """Reasoning told so far."""

        self._buffers = {name: bytearray() for name in _FIELDS}

    @property
    def known(self) -> int:
        """Tokens known."""
        return len(self._buffers["sampled"]) // 4

    def take(self, report: Progress) -> bool:
        """Add what is new in a report; False if it contradicts what was known."""
        skip = self.known - report.offset
        if skip < 0:
            return True
        overlap = report.sampled[: 4 * skip]
        agrees = self._buffers["sampled"].startswith(overlap, 4 * report.offset)
        for name, width in self._widths():
            self._buffers[name] += getattr(report, name)[width * skip :]
        return agrees

    def news(self) -> dict[str, bytes]:
        """Ids, logprobs and alternatives that were not told."""
        start, self.told = self.told, self.known
        return {name: bytes(self._buffers[name][width * start :]) for name, width in self._widths()}

    def begins(self, sequence: SampledSequence) -> bool:
        """Whether what was told is how `sequence` begins."""
        told = sequence.sampled[: 4 * self.told]
        return len(told) == 4 * self.told and self._buffers["sampled"].startswith(told)

    def rest(self, choice: Choice) -> dict[str, bytes]:
        """Ids, logprobs and alternatives of the whole choice that were not told."""
        return {name: getattr(choice, name)[width * self.told :] for name, width in self._widths()}

    def _widths(self) -> Iterator[tuple[str, int]]:
        """Bytes of each field for one token."""
        return ((name, 4 * (self.top if name.startswith("top") else 1)) for name in _FIELDS)


_FIELDS = ("sampled", "logprobs", "top_ids", "top_logprobs")


class StreamedReply:
    """One streamed reply: `follow` while sampling, then `finish` with what was recorded."""

    def __init__(
        self, events: EventStream, messages: Sequence[LiveMessage | LiveText], *, top_logprobs: int
    ) -> None:
        """`messages`: one for each choice. `top_logprobs`: alternatives of each position."""
        self._events = events
        self._choices = [_Choice(message, top_logprobs) for message in messages]
        self._diverged = False
        self._wake = asyncio.Event()

    async def follow(
        self, sample: Callable[[ProgressCallback], Coroutine[Any, Any, list[SampleResult]]], caller: Caller
    ) -> list[SampleResult] | None:
        """Sample, and send what becomes known; None if the caller went away.

        Raises what the sampler raises, as a whole reply would if no event has gone out; GatewayError 503
        when the engine began anew after tokens had been told.
        """
        sampling = asyncio.ensure_future(sample(self.tell))
        gone = caller.gone()
        for task in (sampling, gone):
            task.add_done_callback(lambda _: self._wake.set())
        try:
            while not (sampling.done() or gone.done()):
                await self._send_news(caller)
            if not sampling.done():
                return None
            results = sampling.result()
            self._check(results)
            return results
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    def tell(self, report: Progress) -> None:
        """Take a report. Repeated tokens are dropped, and so is what comes after a gap or makes no sense."""
        if not 0 <= report.index < len(self._choices) or len(report.sampled) != len(report.logprobs):
            logger.warning("progress.drop index=%d bytes=%d", report.index, len(report.sampled))
            return
        self._diverged |= not self._choices[report.index].take(report)
        self._wake.set()

    def finish(self, completion: Completion) -> bytes:
        """The rest of every choice, and the end."""
        rest = [self._rest(index, choice) for index, choice in enumerate(completion.choices)]
        return b"".join((*rest, self._events.finish(completion)))

    def failure(self, error: GatewayError) -> bytes:
        """The end of a stream that failed."""
        return self._events.failure(error)

    def begin(self) -> bytes:
        """The events before anything is told."""
        return self._events.start()

    async def _send_news(self, caller: Caller) -> None:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            await caller.send_events(KEEP_ALIVE if caller.streaming else self.begin())
            return
        self._wake.clear()
        if self._diverged:
            raise _restarted()
        news = b"".join(self._news(index, choice) for index, choice in enumerate(self._choices))
        if news:
            await caller.send_events(news if caller.streaming else self.begin() + news)

    def _news(self, index: int, choice: _Choice) -> bytes:
        if choice.told == choice.known:
            return b""
        news = choice.news()
        reasoning, content = choice.message.feed(unpack_ids(news["sampled"]).tolist())
        choice.reasoning.append(reasoning)
        choice.content.append(content)
        return self._events.delta(MessageDelta(index=index, content=content, reasoning=reasoning, **news))

    def _check(self, results: list[SampleResult]) -> None:
        sequences = [sequence for result in results for sequence in result.sequences]
        for choice, sequence in zip(self._choices, sequences, strict=False):
            if not choice.begins(sequence):
                raise _restarted()

    def _rest(self, index: int, choice: Choice) -> bytes:
        live = self._choices[index]
        content = _after(live.content, choice.message["content"])
        reasoning = _after(live.reasoning, choice.message.get("reasoning_content", ""))
        rest = live.rest(choice)
        if not (content or reasoning or rest["sampled"]):
            return b""
        return self._events.delta(MessageDelta(index=index, content=content, reasoning=reasoning, **rest))


def _after(told: list[str], text: str) -> str:
    """What of `text` was not told. Raises GatewayError 500 if it does not begin with what was."""
    start = "".join(told)
    if not text.startswith(start):
        logger.error("stream.mismatch told=%r text=%r", start[-80:], text[:200])
        message = "the text that was streamed is not the text that was sampled (a bug of this server)"
        raise GatewayError(500, "stream_mismatch", message)
    return text[len(start) :]


def _restarted() -> GatewayError:
    message = "the engine began this sample anew after tokens of it had been sent; ask again"
    return GatewayError(503, "engine_restarted", message)
