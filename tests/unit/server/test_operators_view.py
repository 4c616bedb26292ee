"""What operators see: the fleet, of how much and in which order, and `/openapi.json`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from clock import Clock
from interchange_helpers import run_config
from tinkerscript.access_tokens import Roles
from tinkerscript.ledger import Ledger
from tinkerscript.protocol import Failure, FleetResponse
from tinkerscript.server.app import InterchangeServer, create_server
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.routes import status


@dataclass
class Fleet:
    server: InterchangeServer

    @property
    def interchange(self) -> Interchange:
        return self.server.interchange

    def claim(self, uuid: str, client: str) -> None:
        self.interchange.book.register(uuid, "train", "g", b"{}")
        assert self.interchange.book.claim(client, "train", 60.0) is not None

    def fail(self, uuid: str, failure: Failure) -> None:
        self.interchange.book.poison(uuid, 1, failure)
        self.interchange.settle()

    async def look(self) -> FleetResponse:
        transport = httpx.ASGITransport(self.server.api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return FleetResponse.model_validate_json((await http.get("/fleet")).content)


@pytest.fixture
async def seen(tmp_path: Path, byte_model: Path, clock: Clock, ledger: Ledger) -> AsyncIterator[Fleet]:
    config = run_config(byte_model)
    server = await create_server(config, tmp_path, ledger=ledger, roles=Roles(), clock=clock, wall=clock)
    yield Fleet(server)
    server.link.close()


async def test_lists_are_bounded_and_totals_are_not(seen: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_CLAIMS", "SHOWN_CLIENTS", "MAX_FAILED"):
        monkeypatch.setattr(status, name, 2)
    for number in range(7):
        seen.claim(f"e{number}", f"client-{number}" if number < 3 else "busy")
    for number in (4, 3, 5):
        seen.fail(f"e{number}", Failure(kind="bad"))
    found = await seen.look()
    assert [claim.episode_uuid for claim in found.claims] == ["e0", "e1"]
    assert [episode.episode_uuid for episode in found.failed] == ["e5", "e3"]
    assert found.totals.model_dump() == {"claims": 4, "clients": 4, "quarantined": 0, "failed": 3}
    assert len(found.clients) == 2


async def test_clients_in_quarantine_come_first_whether_they_hold_claims_or_not(seen: Fleet) -> None:
    name = 'it\'s "bad"'
    for number in range(3):
        seen.claim(f"e{number}", "good")
    clients = seen.interchange.clients
    clients.failed(name, "no disk")
    for _ in range(40):
        clients.succeeded("good")
    for _ in range(12):
        clients.failed(name, "no disk")
    found = await seen.look()
    assert [(client.client_uuid, client.claims) for client in found.clients] == [(name, 0), ("good", 3)]
    assert "no disk" in found.clients[0].quarantined
    assert (found.totals.clients, found.totals.quarantined) == (1, 1)


async def test_a_failure_says_whether_it_can_be_retried(seen: Fleet) -> None:
    for uuid in ("new", "sent", "cancelled"):
        seen.claim(uuid, "c")
    seen.fail("new", Failure(kind="bad", message="m" * 5000))
    seen.fail("sent", Failure(kind="bad"))
    seen.interchange.book.offer_failure("sent")
    seen.interchange.book.cancel("cancelled", "the step has enough")
    failed = {each.episode_uuid: each for each in (await seen.look()).failed}
    assert [uuid for uuid, each in failed.items() if each.can_retry] == ["new"]
    assert "was sent to the trainer" in failed["sent"].why_not
    assert "the step has enough" in failed["cancelled"].why_not
    assert len(failed["new"].failures[0].message) == 2000


async def test_a_client_has_a_rate_and_was_seen(seen: Fleet, clock: Clock) -> None:
    """A client with 2 results a second, and one that failed once and came no more."""
    seen.claim("bad", "lost")
    seen.interchange.book.abort("bad", 1, Failure(kind="bad"))
    seen.interchange.settle()
    for number in range(400):
        clock.now += 0.5
        seen.claim(f"e{number}", "quick")
        seen.interchange.settle()
        seen.interchange.clients.succeeded("quick")
    quick, lost = {each.client_uuid: each for each in (await seen.look()).clients}.values()
    assert (quick.client_uuid, quick.ended, quick.failed, quick.idle_s) == ("quick", 400, 0, 0)
    assert quick.episodes_per_min == pytest.approx(120, rel=0.02)
    assert (lost.client_uuid, lost.claims, lost.ended, lost.failed, lost.idle_s) == ("lost", 0, 0, 1, 200)
    assert lost.episodes_per_min < 0.5


# /openapi.json


async def test_everything_is_described(tmp_path: Path, byte_model: Path, ledger: Ledger) -> None:
    server = await create_server(run_config(byte_model), tmp_path, ledger=ledger, roles=Roles())
    server.link.close()
    schema = server.api.openapi()
    described = {
        f"{method} {path}": each
        for path, methods in schema["paths"].items()
        for method, each in methods.items()
    }
    assert described.keys() >= {"post /claim_episode", "get /failed_episodes", "post /v1/chat/completions"}
    for name, operation in [*described.items()]:
        described |= {f"{name} {each['name']}": each for each in operation.get("parameters", [])}
    models = {name: each for name, each in schema["components"]["schemas"].items() if "properties" in each}
    assert "claim_request_id" in models["ClaimEpisodeRequest"]["properties"]
    for name, model in models.items():
        described |= {name: model} | {f"{name}.{key}": each for key, each in model["properties"].items()}
    assert not [name for name, each in described.items() if not each.get("description", "").strip()]
