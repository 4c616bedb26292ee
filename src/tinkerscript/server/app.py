from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.types import ASGIApp

from tinkerscript import __version__
from tinkerscript.access_tokens import ClaimKeys, Roles, load_secret
from tinkerscript.asgi import (
    FastRoute,
    Refusals,
    Responder,
    SiteGuard,
    fast_router,
    in_front,
)
from tinkerscript.config import RunConfig
from tinkerscript.errors import StoreError
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.gateway.endpoint import gateway_of
from tinkerscript.gateway.outside_server import OutsideServer
from tinkerscript.ledger import Ledger
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.limits import Totals
from tinkerscript.model_folder import model_folder, model_name
from tinkerscript.protocol import RefusalResponse
from tinkerscript.server.claims import LeasedClaims, ServedModel
from tinkerscript.server.clients import Clients
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.gateway_supervisor import GatewayPaths, GatewayProcesses
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.routes.engine import EngineRoutes
from tinkerscript.server.routes.episodes import TRANSCRIPT_PATH, EpisodeRoutes
from tinkerscript.server.routes.registrations import RegistrationRoutes
from tinkerscript.server.routes.status import StatusRoutes
from tinkerscript.server.trainer_messages import TrainerMessageHandler, read_last_commit
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import ServerLink

if TYPE_CHECKING:
    from tinkerscript.gateway.samplers import RemoteSampler

SECRET_FILE = "server.secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterchangeServer:
    app: ASGIApp
    api: FastAPI
    link: ServerLink
    interchange: Interchange
    trainer: TrainerMessageHandler
    engine: EngineRoutes
    sampler: LinkSampler
    remote_sampler: RemoteSampler | None
    """Replaces the engine if the config names an inference server."""

    outside: Sequence[OutsideServer]
    gateways: GatewayProcesses | None
    """None: this process answers model calls."""

    @property
    def gateway_ports(self) -> tuple[int, ...]:
        return () if self.gateways is None else self.gateways.ports

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.interchange.run())
            tasks.create_task(self.trainer.run())
            tasks.create_task(self.engine.run())
            if self.gateways is not None:
                tasks.create_task(self.gateways.run())

    async def until_end_is_known(self) -> None:
        await self.interchange.run_end.known_to_all()

    def stop_waiting(self) -> None:
        self.interchange.close()
        self.sampler.close()
        if self.remote_sampler is not None:
            self.remote_sampler.close()
        for server in self.outside:
            server.close()
        if self.gateways is not None:
            self.gateways.stop()


async def create_server(
    config: RunConfig,
    run_dir: Path,
    *,
    ledger: Ledger,
    roles: Roles,
    serve_model: bool = False,
    environ: Mapping[str, str] = MappingProxyType({}),
    remote_sampler: RemoteSampler | None = None,
    outside: Mapping[str, OutsideServer] = MappingProxyType({}),
    listeners: Sequence[socket.socket] = (),
    epoch: int = 0,
    times: LinkTimes | None = None,
    totals: Totals | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> InterchangeServer:
    """Assemble the server of a run folder, with the episodes in `ledger`. Binds nothing yet.

    `serve_model`: the client token is the model's API key. `environ`: clients' tokens. `outside` answers for
    roles. `listeners`: for gateway processes. `epoch`: from `ledger.lead`.
    """
    section, times, totals = config.interchange_server, times or LinkTimes(), totals or Totals()
    book = EpisodeBook(
        clock=clock, max_attempts=section.max_attempts, max_claim_s=section.max_claim_s, wall=wall
    )
    metrics = ServerMetrics(book)
    secret = await ledger.agree("claims", load_secret(run_dir / SECRET_FILE))
    link = ServerLink(server_id=uuid4().hex, epoch=epoch, times=times, count_drop=metrics.count_link_drop)
    sampler = LinkSampler(link, timeout_s=section.call_timeout_s, times=times)
    keys = ClaimKeys(secret, roles)
    claims = LeasedClaims(
        book,
        ledger,
        keys=keys,
        metrics=metrics,
        max_calls=totals.calls,
        max_tokens=section.max_tokens_per_claim,
        gateways=len(listeners),
    )
    gateway = gateway_of(
        config,
        claims=ServedModel(roles.client_token, metrics) if serve_model else claims,
        sampler=remote_sampler or sampler,
        outside=None if serve_model else outside,
    )
    gateways = None
    if listeners:
        gateways = GatewayProcesses(
            config,
            listeners,
            environ=environ,
            claims=claims,
            sampler=sampler,
            metrics=metrics,
            any_host=not roles.are_open,
        )
    interchange = Interchange(
        book=book,
        ledger=ledger,
        metrics=metrics,
        forget=[part.forget for part in (gateway, claims, gateways) if part is not None],
        clock=clock,
        clients=Clients(clock, {each.name: each.max_claims for each in section.clients}),
        totals=totals,
        keeps_failed_calls=config.recording != "off",
    )
    try:
        await interchange.restore()
        last_commit = await read_last_commit(ledger)
    except StoreError:
        link.close()
        raise
    if remote_sampler is not None:
        model = model_name(model_folder(config.engine.model))
        interchange.sample_without_trainer(model)
    trainer = TrainerMessageHandler(
        interchange=interchange,
        ledger=ledger,
        link=link,
        sampler=sampler,
        metrics=metrics,
        times=times,
        last_commit=last_commit,
        storage=StorageLimit(
            ledger,
            config.recording_limit_mb,
            replay_lag=config.replay_lag,
            empty=interchange.empty,
        ),
    )
    engine = EngineRoutes(run_dir, interchange=interchange, link=link)
    episodes = EpisodeRoutes(
        interchange=interchange,
        ledger=ledger,
        keys=keys,
        claims=claims,
        roles=roles,
        config=config,
        gateway_ports=() if gateways is None else gateways.ports,
        run=run_dir.name,
    )
    status = StatusRoutes(
        interchange=interchange, link=link, keys=keys, claims=claims, metrics=metrics, roles=roles
    )
    registrations = RegistrationRoutes(interchange=interchange, roles=roles)
    app, api = _create_app(
        episodes.fast(),
        [registrations.router(), status.router(), gateway.router],
        gateway.routes,
        [engine.router(), status.admin_router()],
        gateways,
        roles,
    )
    return InterchangeServer(
        app=app,
        api=api,
        link=link,
        interchange=interchange,
        trainer=trainer,
        engine=engine,
        sampler=sampler,
        remote_sampler=remote_sampler,
        outside=list(outside.values()),
        gateways=gateways,
    )


def _create_app(
    fast: Mapping[str, FastRoute],
    routes: list[APIRouter],
    model_routes: Mapping[str, Responder],
    admin_routes: list[APIRouter],
    gateways: GatewayProcesses | None,
    roles: Roles,
) -> tuple[ASGIApp, FastAPI]:
    app = FastAPI(
        title="TinkerScript interchange server",
        version=__version__,
        openapi_url=None,
        docs_url=None,  # It loads a script from another host.
        redoc_url=None,
        responses={"4XX": {"model": RefusalResponse, "description": "Refused; the body says why."}},
    )

    async def require_admin(request: Request) -> None:
        roles.check("admin", request.scope)

    refusals = Refusals(REFUSAL_BODIES)
    refusals.install(app)
    for router in (fast_router(fast, tags=["interchange"]), *routes):
        app.include_router(router)
    for router in admin_routes:
        app.include_router(router, dependencies=[Depends(require_admin)])
    front = in_front(app, models=model_routes, fast=fast, refusals=refusals)
    front = SiteGuard(front, any_host=not roles.are_open, refusals=refusals, binary={TRANSCRIPT_PATH})
    if gateways is not None:
        front = GatewayPaths(front, ports=gateways.ports, refusals=refusals)
    return front, app
