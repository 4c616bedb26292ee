"""`LiveReply`: progress of a sample in, events out.

Invariant: what was told of a choice is a prefix of what is recorded of it, in ids and in text, or the stream
ends with an error. A report that came before, or after a gap, changes nothing; the result fills in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects import Choice, Completion, EventStream, MessageDelta
from tinkerscript.gateway.sampler import Progress, Sampler, SampleRequest, SampleResult
from tinkerscript.gateway.serving import KEEP_ALIVE, KEEP_ALIVE_S, Caller
from tinkerscript.gateway.streaming import LiveMessage
from tinkerscript.rollouts.call import unpack_ids

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Choice:
    """What is known of one choice, and how much of it was told."""

    message: LiveMessage
    sampled: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    ids_told: int = 0
    """Bytes of `sampled` that went into deltas."""

    content: list[str] = field(default_factory=list[str])
    """Content told so far."""

    reasoning: list[str] = field(default_factory=list[str])
    """Reasoning told so far."""


class LiveReply:
    """One streamed reply: `follow` while sampling, then `finish` with what was recorded."""

    def __init__(self, events: EventStream, messages: Sequence[LiveMessage]) -> None:
        """`messages`: one for each choice."""
        self._events = events
        self._choices = [_Choice(message) for message in messages]
        self._diverged = False
        self._wake = asyncio.Event()

    async def follow(self, sampler: Sampler, request: SampleRequest, caller: Caller) -> SampleResult | None:
        """Sample, and send what becomes known; None if the caller went away.

        Raises what the sampler raises, as a whole reply would if no event has gone out; GatewayError 503
        when the engine began anew after tokens had been told.
        """
        sampling = asyncio.ensure_future(sampler.sample(request, self.tell))
        gone = asyncio.ensure_future(caller.gone())
        for task in (sampling, gone):
            task.add_done_callback(lambda _: self._wake.set())
        try:
            while not (sampling.done() or gone.done()):
                await self._send_news(caller)
            if not sampling.done():
                return None
            result = sampling.result()
            self._check(result)
            return result
        finally:
            sampling.cancel()
            gone.cancel()
            await asyncio.gather(sampling, gone, return_exceptions=True)

    def tell(self, report: Progress) -> None:
        """Take a report. Repeated tokens are dropped, and so is what comes after a gap or makes no sense."""
        if not 0 <= report.index < len(self._choices) or len(report.sampled) != len(report.logprobs):
            logger.warning("progress.drop index=%d bytes=%d", report.index, len(report.sampled))
            return
        choice = self._choices[report.index]
        known = len(choice.sampled) - 4 * report.offset
        if known < 0:
            return
        overlap = min(known, len(report.sampled))
        start = 4 * report.offset
        if not choice.sampled.startswith(report.sampled[:overlap], start):
            self._diverged = True
        choice.sampled += report.sampled[known:]
        choice.logprobs += report.logprobs[known:]
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
        told = choice.ids_told
        sampled, logprobs = bytes(choice.sampled[told:]), bytes(choice.logprobs[told:])
        if not sampled:
            return b""
        choice.ids_told = len(choice.sampled)
        reasoning, content = choice.message.feed(unpack_ids(sampled).tolist())
        choice.reasoning.append(reasoning)
        choice.content.append(content)
        return self._events.delta(
            MessageDelta(
                index=index, content=content, reasoning=reasoning, sampled=sampled, logprobs=logprobs
            )
        )

    def _check(self, result: SampleResult) -> None:
        for choice, sequence in zip(self._choices, result.sequences, strict=False):
            told = choice.ids_told
            if not choice.sampled.startswith(sequence.sampled[:told]) or len(sequence.sampled) < told:
                raise _restarted()

    def _rest(self, index: int, choice: Choice) -> bytes:
        live = self._choices[index]
        delta = MessageDelta(
            index=index,
            content=_after(live.content, choice.message["content"]),
            reasoning=_after(live.reasoning, choice.message.get("reasoning_content", "")),
            sampled=choice.sampled[live.ids_told :],
            logprobs=choice.logprobs[live.ids_told :],
        )
        nothing_new = not (delta.content or delta.reasoning or delta.sampled)
        return b"" if nothing_new else self._events.delta(delta)


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
