"""A small interchange server for the client's tests: real HTTP, and faults on request."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response

from tinkerscript.protocol import (
    NO_EPISODES,
    RUN_FINISHED,
    AbortEpisodeRequest,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    EndEpisodeRequest,
    SuccessResponse,
    WorkflowOutput,
)


class Exchange:
    """A small interchange server: a queue of episodes, results by episode, and faults on request."""

    def __init__(self, episodes: int = 0) -> None:
        self.queue = [f"e{number}" for number in range(episodes)]
        self.claimed: dict[str, str] = {}
        self.results: dict[str, WorkflowOutput] = {}
        self.aborted: list[AbortEpisodeRequest] = []
        self.keys: list[str] = []
        """Of each end and abort."""

        self.ends: list[EndEpisodeRequest] = []
        self.lost: set[str] = set()
        self.beats: Counter[str] = Counter()
        """Heartbeats by episode."""

        self.payloads: dict[str, Any] = {}
        """Of episodes, if they are not sums."""

        self.hold_s = 0.05
        """Seconds that a claim is held while there is no episode."""

        self.waiting = 0
        """Claims that were held so far."""

        self.run_finished = False
        """Whether claims are answered so once the queue is empty."""

        self.answers: dict[str, ClaimEpisodeResponse] = {}
        """By `claim_request_id`."""

        self.faults: list[tuple[str, int]] = []
        """A path, and the status of the refusal that its next request gets; 0: it is served, and its reply
        breaks off."""

        self.model_url = "http://model/v1"
        self.changed = threading.Condition()
        self.api = FastAPI()
        self.api.post("/claim_episode")(self.claim)
        self.api.post("/end_episode")(self.end)
        self.api.post("/abort_episode")(self.abort)
        self.api.post("/can_continue_episode")(self.can_continue)
        self.api.post("/heartbeat_episode")(self.heartbeat)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        if path in ("/end_episode", "/abort_episode"):
            self.keys.append(
                dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
            )
        fault = next((each for each in self.faults if each[0] == path), None)
        if fault is None:
            await self.api(scope, receive, send)
            return
        self.faults.remove(fault)
        if status := fault[1]:
            await Response(b"{}", status, {"Retry-After": "0"})(scope, receive, send)
        else:
            await self.api(scope, receive, _nowhere)
            headers = [(b"content-length", b"10")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20)

    async def claim(self, request: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        """A repeated request gets the answer of the first."""
        if request.claim_request_id not in self.answers:
            self.answers[request.claim_request_id] = await self._claim(request)
        return self.answers[request.claim_request_id]

    async def _claim(self, request: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        if self.run_finished and not self.queue:
            return ClaimEpisodeResponse(success=False, fail_cause=RUN_FINISHED, run_finished=True)
        if not self.queue:
            with self.changed:
                self.waiting += 1
                self.changed.notify_all()
            await asyncio.sleep(min(request.wait_s, self.hold_s))
            return ClaimEpisodeResponse(success=False, fail_cause=NO_EPISODES)
        with self.changed:
            uuid = self.queue.pop(0)
            self.claimed[uuid] = request.client_uuid
            self.changed.notify_all()
        return ClaimEpisodeResponse(
            success=True,
            episode_uuid=uuid,
            attempt=1,
            openai_base_url=self.model_url,
            openai_api_key=f"key-{uuid}",
            payload=self.payloads.get(uuid, {"sample": {"input": uuid, "target": "e1"}}),
        )

    async def end(self, request: EndEpisodeRequest, response: Response) -> SuccessResponse:
        if request.episode_uuid in self.lost:
            response.status_code = 409
            return SuccessResponse(success=False, failure_reason="the lease ran out")
        with self.changed:
            self.ends.append(request)
            self.results[request.episode_uuid] = request.workflow_output
            self.changed.notify_all()
        return SuccessResponse(success=True)

    async def abort(self, request: AbortEpisodeRequest) -> SuccessResponse:
        with self.changed:
            self.aborted.append(request)
            self.changed.notify_all()
        return SuccessResponse(success=True)

    async def can_continue(self, request: CanContinueEpisodeRequest) -> CanContinueEpisodeResponse:
        reason = "the lease ran out" if request.episode_uuid in self.lost else ""
        return CanContinueEpisodeResponse(can_continue=not reason, reason=reason)

    async def heartbeat(self, request: CanContinueEpisodeRequest) -> CanContinueEpisodeResponse:
        with self.changed:
            self.beats[request.episode_uuid] += 1
            self.changed.notify_all()
        return await self.can_continue(request)


async def _nowhere(message: Any) -> None:
    """A reply that nobody receives."""
