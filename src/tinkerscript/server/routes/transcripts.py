"""`POST /record_transcript`: what a claim's program leaves for people to read.

Invariant: a transcript is bytes that nobody here looks into; its length is known and allowed before any of it
is read, and only the claim that holds the lease may leave one.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException, Request

from tinkerscript.asgi import FastRoute
from tinkerscript.protocol import SuccessResponse
from tinkerscript.server.accounts import Accounts
from tinkerscript.server.auth import ClaimKeys
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.store.episode_store import EpisodeStore

PATH = "/record_transcript"

MAX_READING_BYTES = 64 * 2**20
"""Of transcripts that are being received; one more is asked to come later."""

_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "The transcript: bytes that the server does not read.",
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class TranscriptRoutes:
    """The route of transcripts."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        store: EpisodeStore,
        keys: ClaimKeys,
        accounts: Accounts | None,
        max_bytes: int,
    ) -> None:
        """`max_bytes`: of one attempt's; 0 takes none."""
        self._interchange = interchange
        self._store = store
        self._keys = keys
        self._accounts = accounts
        self._max_bytes = max_bytes
        self._reading = 0
        """Bytes that are being received."""

    def fast(self) -> dict[str, FastRoute]:
        """It takes the claim's own key."""
        return {PATH: FastRoute(self.record_transcript, self._keys.authorize, _BODY)}

    async def record_transcript(self, request: Request) -> SuccessResponse:
        """Leave the transcript of a claim that has not ended, under the claim's key; a second one replaces
        it. It goes into the run's record and trains nothing."""
        claim = self._keys.claim_of(request.scope, "")
        self._interchange.book.held(*claim)
        length = self._length(request)
        self._reading += length
        try:
            body = await request.body()
        finally:
            self._reading -= length
        if self._accounts is not None and (holder := self._accounts.holder(*claim)) is not None:
            holder.send(body)
        self._store.add_transcript(self._interchange.book.held(*claim), claim.attempt, body)
        await self._interchange.commit()
        return SuccessResponse(success=True)

    def _length(self, request: Request) -> int:
        """Bytes of the body. Raises HTTPException for one that is not taken, or not now."""
        try:
            length = int(request.headers["content-length"])
        except (KeyError, ValueError):
            raise HTTPException(411, "send the transcript's length in a Content-Length header") from None
        if not 0 < length <= self._max_bytes:
            setting = "recording_transcript_kb" if self._max_bytes else "recording, recording_transcript_kb"
            raise HTTPException(
                413, f"the transcript has {length} bytes; this run takes 1 to {self._max_bytes} ({setting})"
            )
        if self._reading + length > MAX_READING_BYTES:
            raise HTTPException(503, f"{self._reading} bytes of transcripts are being received; try again")
        return length
