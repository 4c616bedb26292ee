"""A whole server with a trainer on its link, for the tests of the endpoints."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from interchange_helpers import FAST, eventually, run_config, trainer
from tinkerscript.access_tokens import ADMIN_TOKEN
from tinkerscript.http_server import ConnectionLimits
from tinkerscript.limits import Totals
from tinkerscript.protocol import ClaimEpisodeResponse, EngineStatusResponse
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.trainer_end import TrainerLink

OUTPUT = {"reward": 1.0, "is_success": True, "metadata": {"answer": "2"}, "log_metrics": {"turns": 1}}


@dataclass
class Setup:
    """One server, its trainer, and a client of its HTTP."""

    http: httpx.AsyncClient
    link: TrainerLink
    url: str
    run_dir: Path
    sampler: ScriptedSampler

    member: dict[str, str] = field(default_factory=dict[str, str])
    """Headers that open what is closed to strangers."""

    notes: list[str] = field(default_factory=list[str])
    """What the trainer was told to say."""

    keys: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """The keys of the claims that `claim` made, by episode and attempt."""

    async def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """With `attempt`, a request of that claim, under its key."""
        key = self.keys.get((body.get("episode_uuid", ""), body.pop("attempt", 0)), "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = await self.http.post(path, json=body, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def claim(self, client: str = "c", **more: Any) -> ClaimEpisodeResponse:
        body = {"client_uuid": client, "sends_key": True} | more
        reply = ClaimEpisodeResponse.model_validate(await self.post("/claim_episode", **body))
        for claim in (reply, *reply.more) if reply.success else ():
            self.keys[claim.episode_uuid, claim.attempt] = claim.openai_api_key
        return reply

    async def end(self, claim: ClaimEpisodeResponse) -> None:
        names = {"episode_uuid": claim.episode_uuid, "attempt": claim.attempt}
        await self.post("/end_episode", **names, workflow_output=OUTPUT)

    async def call(self, key: str, text: str = "1+1") -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": text}]},
            headers={"Authorization": f"Bearer {key}"},
        )

    async def metric(self, line: str) -> float:
        text = (await self.http.get("/metrics", headers=self.member)).text
        found = [row.rpartition(" ")[2] for row in text.splitlines() if row.startswith(f"{line} ")]
        assert found, f"{line} is not in\n{text}"
        return float(found[0])

    async def metric_becomes(self, line: str, value: float) -> None:
        await eventually(lambda: self._metric_is(line, value))

    async def _metric_is(self, line: str, value: float) -> bool:
        return await self.metric(line) == value

    async def status(self) -> EngineStatusResponse:
        reply = await self.http.get("/get_engine_status", headers=self.member)
        return EngineStatusResponse.model_validate(reply.json())


@asynccontextmanager
async def serving(
    tmp_path: Path,
    model: Path,
    *,
    environ: dict[str, str] | None = None,
    verify: ssl.SSLContext | bool = True,
    sampler: ScriptedSampler | None = None,
    totals: Totals | None = None,
    connections: ConnectionLimits | None = None,
    **interchange: Any,
) -> AsyncGenerator[Setup]:
    """A server of `tmp_path` with a trainer on its link; `interchange` adds keys of `interchange_server`."""
    config = run_config(model, **interchange)
    sampler = sampler or ScriptedSampler(lambda prompt: [72, 105, prompt[-1]], policy_version=4)
    async with running_server(
        config, tmp_path, environ=environ or {}, times=FAST, totals=totals, connections=connections
    ) as (info, task):
        notes = list[str]()
        async with (
            trainer(info.link_address, sampler.sample, note=notes.append) as link,
            httpx.AsyncClient(base_url=info.url, timeout=30, verify=verify) as http,
        ):
            await link.resume([])
            token = (environ or {}).get(ADMIN_TOKEN)
            member = {"Authorization": f"Bearer {token}"} if token else {}
            yield Setup(http, link, info.url, tmp_path, sampler, member, notes)
        assert not task.done()
