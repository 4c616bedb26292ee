"""Assembles the server from a config and a run folder: book, store, link, gateway and routes.

Owns the order of construction; `InterchangeServer.run` owns the background tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.types import ASGIApp

from tinkerscript import __version__
from tinkerscript.asgi import (
    Deferred,
    FastRoute,
    ForMembers,
    Refusals,
    Responder,
    fast_router,
    in_front,
)
from tinkerscript.config import InterchangeConfig, RunConfig
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.gateway.dialects import REFUSAL_BODIES, ChatCompletions
from tinkerscript.gateway.gateway import gateway_of
from tinkerscript.gateway.outside_server import OutsideServer
from tinkerscript.model_folder import model_folder, model_name
from tinkerscript.protocol import RefusalResponse
from tinkerscript.server.accounts import Accounts
from tinkerscript.server.auth import (
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    MIN_TOKEN_CHARS,
    ClaimKeys,
    Roles,
    load_secret,
    reached_through,
)
from tinkerscript.server.claims import ClaimLimits, LeasedClaims, ServedModel
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.gateways.gateway_children import GatewayPaths, GatewayProcesses
from tinkerscript.server.interchange import ClientLimits, Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.mirror_process import MirrorProcess
from tinkerscript.server.page_proxy import PageProcess, PageProxy
from tinkerscript.server.passing import Adopt, hang_up
from tinkerscript.server.routes.engine import EngineRoutes
from tinkerscript.server.routes.episodes import EpisodeRoutes
from tinkerscript.server.routes.operator import OperatorRoutes
from tinkerscript.server.routes.registrations import RegistrationRoutes
from tinkerscript.server.routes.status import StatusRoutes
from tinkerscript.server.routes.transcripts import TranscriptRoutes
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.server.trainer_messages import TrainerMessageHandler
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import ServerLink

if TYPE_CHECKING:
    from tinkerscript.gateway.samplers import RemoteSampler

SECRET_FILE = "server.secret"

TRY_PATH = f"/try{ChatCompletions.path}"
"""Where the admin samples what is not recorded."""

MEMBERS_PATHS = frozenset({"/openapi.json", "/metrics", "/get_engine_status", "/get_batch_progress"})
"""Paths that take the client role, like those whose routes ask for it themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterchangeServer:
    """The assembled server: an ASGI app, and the tasks behind it."""

    app: ASGIApp
    api: FastAPI
    """What is behind `app`, and documents all of it."""

    link: ServerLink
    interchange: Interchange
    trainer: TrainerMessageHandler
    engine: EngineRoutes
    sampler: LinkSampler
    remote_sampler: RemoteSampler | None
    """Samples instead of the engine, if the config names an inference server."""

    outside: Sequence[OutsideServer]
    """What answers for roles."""

    page: PageProcess | None
    """The page of the run; None where a model is served and there is no run."""

    mirror: MirrorProcess | None
    """Of the record of a trainer elsewhere; None as for the page."""

    gateways: GatewayProcesses | None
    """The processes that answer model calls; None: this one does."""

    async def run(self, adopt: Adopt = hang_up) -> None:
        """Run the background tasks until cancelled. Raises the error of the first that fails.

        `adopt`: answers the connections that gateway processes give back.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.interchange.run())
            tasks.create_task(self.trainer.run())
            tasks.create_task(self.engine.run())
            if self.page is not None:
                tasks.create_task(self.page.run())
            if self.mirror is not None:
                tasks.create_task(self.mirror.run())
            if self.gateways is not None:
                tasks.create_task(self.gateways.run(adopt))

    async def say_farewell(self) -> None:
        """Wait until the clients of a finished run know that it is, for a moment at most."""
        await self.interchange.run_end.all_told()

    def stop_waiting(self) -> None:
        """Answer waiting long polls and model calls, so that their connections can close."""
        self.interchange.close()
        self.sampler.close()
        if self.remote_sampler is not None:
            self.remote_sampler.close()
        for server in self.outside:
            server.close()
        if self.page is not None:
            self.page.close()
        if self.gateways is not None:
            self.gateways.stop()


async def create_server(
    config: RunConfig,
    run_dir: Path,
    *,
    store: EpisodeStore,
    roles: Roles,
    serve_model: bool = False,
    environ: Mapping[str, str] = MappingProxyType({}),
    remote_sampler: RemoteSampler | None = None,
    outside: Mapping[str, OutsideServer] = MappingProxyType({}),
    epoch: int = 0,
    times: LinkTimes | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> InterchangeServer:
    """Assemble the server of a run folder, with the episodes in `store`. Binds nothing yet.

    With `serve_model` the client token is the API key of the model. `environ` has the tokens of
    `interchange_server.clients`. `remote_sampler` samples instead of the trainer's engine; `outside`
    answers for roles. `epoch` is what `store.lead` returned. Raises ConfigError and StoreError.
    """
    section, times = config.interchange_server, times or LinkTimes()
    processes = section.processes if section.processes > 1 and not serve_model else 0
    book = EpisodeBook(
        clock=clock, max_attempts=section.max_attempts, max_claim_s=section.max_claim_s, wall=wall
    )
    metrics = ServerMetrics(book)
    accounts = _accounts(section, roles, environ, metrics, clock)
    if accounts is not None:
        roles = replace(roles, is_client=accounts.of)
    secret = await store.agree("claims", load_secret(run_dir / SECRET_FILE))
    link = ServerLink(server_id=uuid4().hex, epoch=epoch, times=times, count_drop=metrics.count_link_drop)
    sampler = LinkSampler(link, timeout_s=section.call_timeout_s, times=times)
    keys = ClaimKeys(secret, roles)
    claims = LeasedClaims(
        book,
        store,
        keys=keys,
        metrics=metrics,
        limits=ClaimLimits(section.max_calls_per_claim, section.max_tokens_per_claim),
        gateways=processes,
    )
    gateway = gateway_of(
        config,
        claims=ServedModel(roles.client_token, metrics) if serve_model else claims,
        sampler=remote_sampler or sampler,
        outside=None if serve_model else outside,
    )
    gateways = None
    if processes:
        gateways = GatewayProcesses(config, environ=environ, claims=claims, sampler=sampler, metrics=metrics)
    interchange = Interchange(
        book=book,
        store=store,
        metrics=metrics,
        forget=[part.forget for part in (gateway, claims, accounts, gateways) if part is not None],
        clock=clock,
        limits=ClientLimits(
            section.max_claims_per_client,
            section.max_pool_episodes,
            section.max_groups_ahead,
            section.quarantine_s,
        ),
        accounts=accounts,
        keeps_failed_calls=config.recording != "off",
    )
    try:
        await interchange.restore()
    except StoreError:
        link.close()
        raise
    if accounts is not None:
        accounts.restore(book)
    if remote_sampler is not None:
        model = model_name(model_folder(config.engine.model))
        interchange.sample_without_trainer(model, config.inference.policy_version)
    mirror = None if serve_model else MirrorProcess(run_dir, send=link.send, withheld=config.key_variables)
    trainer = TrainerMessageHandler(
        interchange=interchange,
        store=store,
        link=link,
        sampler=sampler,
        metrics=metrics,
        times=times,
        mirror=mirror,
    )
    engine = EngineRoutes(run_dir, interchange=interchange, link=link)
    episodes = EpisodeRoutes(
        interchange=interchange,
        keys=keys,
        claims=claims,
        accounts=accounts,
        roles=roles,
        metrics=metrics,
        public_base_url=section.public_base_url,
        max_metadata_bytes=section.max_metadata_bytes,
        max_reward=section.max_reward,
        trained_roles=config.trained_roles,
        max_transcript_bytes=config.max_transcript_bytes,
        model_roles=list(config.episode_roles),
        gateways=processes,
        run=run_dir.name,
    )
    transcripts = TranscriptRoutes(
        interchange=interchange,
        store=store,
        keys=keys,
        accounts=accounts,
        max_bytes=config.max_transcript_bytes,
    )
    registrations = RegistrationRoutes(interchange=interchange, roles=roles, accounts=accounts)
    status = StatusRoutes(
        interchange=interchange, link=link, keys=keys, claims=claims, metrics=metrics, roles=roles
    )
    open_routes = [registrations.router(), status.router(), gateway.router]
    admin_routes = [
        engine.router(),
        OperatorRoutes(interchange=interchange, link=link).router(),
    ]
    model_routes, page = gateway.routes, None
    if not serve_model:
        tried = gateway.for_others(ServedModel(roles.admin_token, None)).routes[ChatCompletions.path]
        model_routes = gateway.routes | {TRY_PATH: tried}
        open_routes.append(_try_router(tried))
        page = PageProcess(run_dir, admin_token=roles.admin_token, withheld=config.key_variables)
    app, api = _create_app(
        episodes.fast() | transcripts.fast(),
        open_routes,
        model_routes,
        admin_routes,
        page,
        gateways,
        roles,
        section.max_body_bytes,
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
        page=page,
        mirror=mirror,
        gateways=gateways,
    )


def _accounts(
    section: InterchangeConfig,
    roles: Roles,
    environ: Mapping[str, str],
    metrics: ServerMetrics,
    clock: Callable[[], float],
) -> Accounts | None:
    """The clients with tokens of their own; None if there are none. Raises ConfigError."""
    if not section.clients:
        return None
    if roles.client_token is None:
        raise ConfigError(
            f"interchange_server.clients: without {CLIENT_TOKEN} and {ADMIN_TOKEN} everybody may enter: "
            "set both"
        )
    return Accounts(
        section.clients,
        environ,
        metrics=metrics,
        clock=clock,
        other_tokens=(roles.client_token, roles.admin_token),
        min_chars=MIN_TOKEN_CHARS if reached_through(section) else 1,
    )


def _try_router(responder: Responder) -> APIRouter:
    """Documents what `ModelRoutes` answers."""

    async def chat_without_a_claim() -> Response:
        return Deferred(responder)

    router = APIRouter(tags=["operator"])
    router.add_api_route(
        TRY_PATH,
        chat_without_a_claim,
        methods=["POST"],
        response_model=None,
        description="OpenAI's `POST /chat/completions` with the newest weights, for the admin. The call "
        "belongs to no episode and is not recorded, and what the run samples stays the same.",
    )
    return router


def _create_app(
    fast: Mapping[str, FastRoute],
    routes: list[APIRouter],
    model_routes: Mapping[str, Responder],
    admin_routes: list[APIRouter],
    page: PageProcess | None,
    gateways: GatewayProcesses | None,
    roles: Roles,
    max_body_bytes: int,
) -> tuple[ASGIApp, FastAPI]:
    """The ASGI app: all routes, each behind its role; and the part of it that documents them."""
    app = FastAPI(
        title="TinkerScript interchange server",
        version=__version__,
        docs_url=None,  # FastAPI's own asks another host for its script. The page's documentation has it all.
        redoc_url=None,
        responses={"4XX": {"model": RefusalResponse, "description": "Refused; the body says why."}},
    )

    async def require_admin(request: Request) -> None:
        roles.check("admin", request.scope)

    refusals = Refusals({**REFUSAL_BODIES, TRY_PATH: ChatCompletions.error_body})
    refusals.install(app)
    app.add_middleware(
        ForMembers, paths=MEMBERS_PATHS, authorize=partial(roles.check, "client"), refusals=refusals
    )
    if page is not None:
        app.add_middleware(PageProxy, page=page, refusals=refusals)
    for router in (fast_router(fast, tags=["interchange"]), *routes):
        app.include_router(router)
    for router in admin_routes:
        app.include_router(router, dependencies=[Depends(require_admin)])
    front = in_front(app, models=model_routes, fast=fast, max_body_bytes=max_body_bytes, refusals=refusals)
    if gateways is not None:
        front = GatewayPaths(front, gateways=gateways, refusals=refusals)
    return front, app
