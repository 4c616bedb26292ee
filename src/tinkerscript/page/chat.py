"""`ChatRoutes`: a conversation with the newest weights of a run that goes on, or with a checkpoint.

Invariant: nothing of it is recorded, and no run samples differently for it.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from tinkerscript.page.access import write_audit
from tinkerscript.page.checkpoint_server import CheckpointServer, LoadedCheckpoint, SavedWeights, checkpoints
from tinkerscript.page.run_server import RunServers
from tinkerscript.page.runs import Runs


class ChatRequest(BaseModel):
    """A conversation to continue."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    checkpoint: str = Field(
        default="", description="The loaded checkpoint; empty: the newest weights of a run that goes on."
    )
    temperature: float = Field(default=1.0, ge=0, le=5)
    max_tokens: int = Field(default=256, ge=1, le=100_000)
    seed: int | None = Field(default=None, ge=0)


class ChatToken(BaseModel):
    id: int
    text: str
    logprob: float


class ChatReply(BaseModel):
    """What was sampled."""

    message: dict[str, Any]
    finish_reason: str
    tokens: list[ChatToken]
    prompt_tokens: int


class ChatRoutes:
    """The routes. The page lets only the admin reach them."""

    def __init__(self, runs: Runs, servers: RunServers) -> None:
        self._runs = runs
        self._servers = servers
        self.checkpoint_server = CheckpointServer()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["chat"])
        router.post("/api/runs/{run}/chat")(self.chat)
        router.get("/api/runs/{run}/checkpoints")(self.checkpoints)
        router.post("/api/runs/{run}/checkpoints/{name}/load")(self.load)
        router.get("/api/loaded-checkpoint")(self.loaded)
        router.post("/api/loaded-checkpoint/end")(self.end)
        return router

    async def chat(self, run: str, body: ChatRequest) -> ChatReply:
        """A reply of the newest weights, or of the loaded checkpoint. Nothing is recorded, and no episode's
        sampling changes."""
        options = body.model_dump(exclude_none=True, exclude={"checkpoint"})
        request = options | {"model": "policy", "logprobs": True, "return_token_ids": True}
        if not body.checkpoint:
            return _chat_reply(await self._servers.of(self._runs.record(run).folder).chat(request))
        request["model"] = body.checkpoint
        return _chat_reply(await self.checkpoint_server.chat(run, body.checkpoint, request))

    def checkpoints(self, run: str) -> list[SavedWeights]:
        """The checkpoints of a run that are still there, newest first."""
        return checkpoints(self._runs.record(run).folder)

    async def load(self, run: str, name: str, request: Request) -> LoadedCheckpoint:
        """Load a checkpoint to chat with, on this machine's processor, in place of the one before."""
        folder = self._runs.record(run).folder
        loaded = await self.checkpoint_server.load(run, folder, name)
        write_audit(folder, request, f"load checkpoint {name}")
        return loaded

    async def loaded(self) -> LoadedCheckpoint:
        """The checkpoint that is loaded, of whichever run."""
        return self.checkpoint_server.loaded

    async def end(self, request: Request) -> LoadedCheckpoint:
        """End the checkpoint that is loaded."""
        loaded = self.checkpoint_server.loaded
        await self.checkpoint_server.end()
        if loaded.run:
            write_audit(self._runs.record(loaded.run).folder, request, f"end checkpoint {loaded.name}")
        return self.checkpoint_server.loaded


def _chat_reply(reply: dict[str, Any]) -> ChatReply:
    choice = reply["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    return ChatReply(
        message=choice["message"],
        finish_reason=choice["finish_reason"],
        tokens=[
            ChatToken(id=entry["token_id"], text=entry["token"], logprob=entry["logprob"])
            for entry in entries
        ],
        prompt_tokens=reply["usage"]["prompt_tokens"],
    )
