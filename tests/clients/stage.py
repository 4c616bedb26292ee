"""`Stage`: what stands behind the clients: a server process and the scripted model on its link.

Every feature is played in an episode of its own: registered over the link, claimed and ended over HTTP, its
result taken from the link as a trainer takes it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
from scripted_model import ScriptedModel

from interchange_helpers import FAST, collect, eventually, new_episode, run_config
from run_ledger import used
from tinkerscript.addresses import ServerInfo, read_server_info
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.rollouts.call import Call
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tinkerscript.trainer_link.trainer_end import TrainerLink

CLIENT = "clients"
OUTPUT = {"reward": 1.0, "is_success": True, "metadata": {}, "log_metrics": {}}


@dataclass
class Stage:
    """A server and the model behind it."""

    model: ScriptedModel
    link: TrainerLink
    http: httpx.AsyncClient

    async def claim(self) -> ClaimEpisodeResponse:
        """A new episode, claimed. Forgets what was before."""
        self.model.reset()
        await self.link.register([new_episode()])
        body = {"client_uuid": CLIENT, "sends_key": True}
        reply = await self.http.post("/claim_episode", json=body)
        claim = ClaimEpisodeResponse.model_validate(reply.raise_for_status().json())
        assert claim.success, claim.fail_cause
        return claim

    async def end(self, claim: ClaimEpisodeResponse) -> list[Call]:
        """End an episode; its calls, as the trainer receives them."""
        body = {"client_uuid": CLIENT, "episode_uuid": claim.episode_uuid, "workflow_output": OUTPUT}
        headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
        reply = await self.http.post("/end_episode", json=body, headers=headers)
        assert reply.raise_for_status().json()["success"], reply.text
        outcome = (await collect(self.link, 1))[claim.episode_uuid]
        await self.link.commit(used([outcome]))
        assert isinstance(outcome, EpisodeAccepted)
        return outcome.calls


def long_context_model(folder: Path, context: int) -> Path:
    """The tiny model's tokenizer, in a folder that says that its context is long."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, folder)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder


def _config(model: Path) -> RunConfig:
    config = run_config(model)
    sampling = config.sampling.model_copy(update={"max_tokens": 4096})
    return config.model_copy(update={"sampling": sampling})


@asynccontextmanager
async def open_stage(folder: Path, *, seed: int, context: int = 65536) -> AsyncGenerator[Stage]:
    """A stage in `folder` while the context is open."""
    model_folder = long_context_model(folder / "model", context)
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(_config(model_folder)))
    model = ScriptedModel(model_folder, seed=seed)
    async with _server(run_dir) as info:
        link = TrainerLink(
            info.link_address, trainer_id=uuid4().hex, model="scripted", sampler=model.sample, times=FAST
        )
        async with link, httpx.AsyncClient(base_url=info.url) as http:
            await link.resume([])
            yield Stage(model, link, http)


@asynccontextmanager
async def _server(run_dir: Path) -> AsyncGenerator[ServerInfo]:
    with (run_dir / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(run_dir), stdout=log, stderr=log
        )
    try:

        async def listens() -> bool:
            assert process.returncode is None, (run_dir / "server.log").read_text()
            return read_server_info(run_dir) is not None

        await eventually(listens, "the server's start")
        info = read_server_info(run_dir)
        assert info is not None
        yield info
    finally:
        process.terminate()
        await process.wait()
