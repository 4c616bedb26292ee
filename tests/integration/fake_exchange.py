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
    EngineStatusResponse,
    RegisterEpisodeRequest,
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

        self.pools: dict[str, list[RegisterEpisodeRequest]] = {}
        """What clients registered, by pool; claimed from the front."""

        self.hold_s = 0.05
        """Seconds that a claim is held while there is no episode."""

        self.waiting = 0
        """Claims that were held so far."""

        self.run_finished = False
        """Whether claims are answered so once the queue is empty."""

        self.answers: dict[str, ClaimEpisodeResponse] = {}
        """By `claim_request_id`."""

        self.lose_replies: list[str] = []
        """Paths whose next request is served while its reply breaks off."""

        self.busy: list[str] = []
        """Paths whose next request is answered 503."""

        self.refuse_once: dict[str, int] = {}
        """Path -> status of the refusal that its next request gets."""

        self.model_url, self.model_key = "http://model/v1", ""
        self.changed = threading.Condition()
        self.api = FastAPI()
        self.api.post("/claim_episode")(self.claim)
        self.api.post("/end_episode")(self.end)
        self.api.post("/abort_episode")(self.abort)
        self.api.post("/can_continue_episode")(self.can_continue)
        self.api.post("/heartbeat_episode")(self.heartbeat)
        self.api.post("/register_episode")(self.register)
        self.api.get("/get_engine_status")(self.status)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        if path in ("/end_episode", "/abort_episode"):
            self.keys.append(
                dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
            )
        if path in self.refuse_once:
            await Response(b"{}", self.refuse_once.pop(path))(scope, receive, send)
        elif path in self.busy:
            self.busy.remove(path)
            await Response(b"{}", 503, {"Retry-After": "0"})(scope, receive, send)
        elif path in self.lose_replies:
            self.lose_replies.remove(path)
            await self.api(scope, receive, _nowhere)
            headers = [(b"content-length", b"10")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        else:
            await self.api(scope, receive, send)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20)

    async def claim(self, request: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        """A repeated request gets the answer of the first."""
        if request.claim_request_id not in self.answers:
            self.answers[request.claim_request_id] = await self._claim(request)
        return self.answers[request.claim_request_id]

    async def _claim(self, request: ClaimEpisodeRequest) -> ClaimEpisodeResponse:
        if self.pools.get(request.pool):
            own = self.pools[request.pool].pop(0)
            return ClaimEpisodeResponse(
                success=True, episode_uuid=own.episode_uuid, attempt=1, payload=own.payload
            )
        if self.run_finished and not self.queue:
            return ClaimEpisodeResponse(success=False, fail_cause=RUN_FINISHED, run_finished=True)
        if not self.queue or request.pool:
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
            openai_api_key=self.model_key or f"key-{uuid}",
            payload={"sample": {"input": uuid, "target": "e1"}},
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

    async def register(self, request: RegisterEpisodeRequest, response: Response) -> SuccessResponse:
        pool = self.pools.setdefault(request.client_uuid, [])
        known = {episode.episode_uuid: episode for episode in pool}
        if request.episode_uuid not in known:
            pool.append(request)
        elif known[request.episode_uuid] != request:
            response.status_code = 409
            return SuccessResponse(success=False, failure_reason="other content")
        return SuccessResponse(success=True)

    async def status(self) -> EngineStatusResponse:
        return EngineStatusResponse(
            engine_status="ENGINE.ROLLING",
            policy_version=3,
            global_step=2,
            model="tiny",
            episodes={},
            trainer_connected=True,
        )


async def _nowhere(message: Any) -> None:
    """A reply that nobody receives."""
