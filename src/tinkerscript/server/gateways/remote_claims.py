"""`RemoteClaims`: the claims as a gateway process sees them, through its channel to the server.

Invariant: what the server has not answered has not happened: a call counts as recorded once the server's
store has it, as in the server's own process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.logs import now_about
from tinkerscript.rollouts.call import Call
from tinkerscript.server.gateways.channel import (
    Answer,
    Ask,
    AskBegin,
    AskCalls,
    AskOpen,
    AskRecord,
    AskRefused,
    CallOver,
)
from tinkerscript.trainer_link.messages import Tagged


class RemoteClaims(ClaimBook):
    """Asks the server."""

    def __init__(self, send: Callable[[Tagged], None]) -> None:
        """`send`: to the server, whose answers go to `answered`."""
        self._send = send
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._begun: dict[tuple[OpenClaim, int, int], list[int]] = {}
        """Claim, samples, and tokens of each -> the `AskBegin`s that allowed so much, and are not over."""

    async def open(self, key: str) -> OpenClaim:
        answer = await self._ask(AskOpen(ask_id=next(self._ids), key=key))
        assert answer.claim is not None
        now_about(episode=answer.claim.episode_uuid, attempt=answer.claim.attempt)
        return answer.claim

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> int:
        ask = AskBegin(ask_id=next(self._ids), claim=claim, num_samples=num_samples, max_tokens=max_tokens)
        try:
            answer = await self._ask(ask)
        except asyncio.CancelledError:
            self._send(CallOver(ask_id=ask.ask_id))
            raise
        self._begun.setdefault((claim, num_samples, answer.max_tokens), []).append(ask.ask_id)
        return answer.max_tokens

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> None:
        kind = (claim, num_samples, max_tokens)
        self._send(CallOver(ask_id=self._begun[kind].pop()))
        if not self._begun[kind]:
            del self._begun[kind]

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        await self._ask(AskRecord(ask_id=next(self._ids), claim=claim, calls=list(calls)))

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return list((await self._ask(AskCalls(ask_id=next(self._ids), claim=claim))).calls)

    async def _ask(self, ask: Ask) -> Answer:
        self._asked[ask.ask_id] = asyncio.get_running_loop().create_future()
        self._send(ask)
        try:
            return await self._asked[ask.ask_id]
        finally:
            del self._asked[ask.ask_id]

    def answered(self, answer: Answer | AskRefused) -> None:
        """Take an answer of the server; one that nobody waits for any more is dropped."""
        asked = self._asked.get(answer.ask_id)
        if asked is None or asked.done():
            return
        if isinstance(answer, Answer):
            asked.set_result(answer)
        else:
            asked.set_exception(GatewayError(answer.status, answer.code, answer.message))
