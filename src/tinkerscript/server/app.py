"""Puts the server together: book, store, link, gateway and routes, from a config and a run folder.

Owns nothing but the order of construction; `InterchangeServer.run` owns the background tasks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fastapi import FastAPI

from tinkerscript import __version__
from tinkerscript.asgi import refusals
from tinkerscript.asgi.caller import ModelRoutes
from tinkerscript.asgi.fast_routes import add_endpoints
from tinkerscript.asgi.refusals import BodyLimit
from tinkerscript.config import RunConfig
from tinkerscript.gateway.gateway import Gateway, create_gateway
from tinkerscript.gateway.samplers import RemoteSampler
from tinkerscript.model_folder import model_folder
from tinkerscript.protocol import RefusalResponse
from tinkerscript.server.auth import ADMIN_TOKEN, CLIENT_TOKEN, Roles, load_secret, read_token
from tinkerscript.server.claims import ClaimLimits, LeasedClaims, ServedModel
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.interchange import ClientLimits, Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.outcome_delivery import OutcomeDelivery
from tinkerscript.server.routes.engine import EngineControl, train_config_router
from tinkerscript.server.routes.episodes import Endpoints, register_router, requires
from tinkerscript.server.routes.operator import OperatorEndpoints
from tinkerscript.server.store.base import EpisodeStore
from tinkerscript.server.trainer_messages import TrainerMessageHandler
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import ServerLink

SECRET_FILE = "server.secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterchangeServer:
    """The assembled server: an ASGI app, and the tasks behind it."""

    app: FastAPI
    link: ServerLink
    server_id: str
    interchange: Interchange
    desk: TrainerMessageHandler
    engine_control: EngineControl
    sampler: LinkSampler
    remote_sampler: RemoteSampler | None
    """Samples in the engine's place, if the config names a server for that."""

    store: EpisodeStore

    async def run(self) -> None:
        """The background tasks, until cancelled. Raises what made one of them fail."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.interchange.run())
            tasks.create_task(self.desk.run())
            tasks.create_task(self.engine_control.run())

    def stop_waiting(self) -> None:
        """Answer long polls and model calls that wait, so that their connections can close."""
        self.interchange.close()
        self.sampler.close()
        if self.remote_sampler is not None:
            self.remote_sampler.close()


def create_server(
    config: RunConfig,
    run_dir: Path,
    *,
    store: EpisodeStore,
    environ: Mapping[str, str],
    serve_model: bool = False,
    remote_sampler: RemoteSampler | None = None,
    times: LinkTimes | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> InterchangeServer:
    """Assemble the server of a run folder. Binds nothing yet.

    `environ` holds the tokens of the roles; with `serve_model` the client token opens the model itself.
    `remote_sampler` samples in the place of the trainer's engine. Raises ConfigError and StoreError.
    """
    section, times = config.interchange_server, times or LinkTimes()
    if serve_model and read_token(environ, CLIENT_TOKEN) and not read_token(environ, ADMIN_TOKEN):
        # Nobody administers a served model: its admin token, if none is set, is known to nobody.
        environ = {**environ, ADMIN_TOKEN: secrets.token_hex()}
    roles = Roles.for_host(section.interchange_server_host, environ)
    secret = load_secret(run_dir / SECRET_FILE)
    server_id = uuid4().hex
    book = EpisodeBook(
        clock=clock, max_attempts=section.max_attempts, max_claim_s=section.max_claim_s, wall=wall
    )
    metrics = ServerMetrics(book)
    link = ServerLink(server_id=server_id, times=times, count_drop=metrics.count_link_drop)
    sampler = LinkSampler(link, timeout_s=section.call_timeout_s, times=times)
    claims = LeasedClaims(
        book,
        store,
        secret=secret,
        counter=metrics,
        limits=ClaimLimits(section.max_calls_per_claim, section.max_tokens_per_claim),
    )
    folder = model_folder(config.engine.model)
    gateway = create_gateway(
        claims=ServedModel(roles.client_token, metrics) if serve_model else claims,
        sampler=remote_sampler or sampler,
        model_folder=folder,
        model_name=folder.name,
        sampling=config.sampling,
    )
    courier = OutcomeDelivery(book=book, store=store, link=link, clock=clock)

    def forget(uuid: str, attempt: int) -> None:
        gateway.forget(uuid, attempt)
        claims.forget(uuid, attempt)

    interchange = Interchange(
        book=book,
        store=store,
        courier=courier,
        metrics=metrics,
        forget=forget,
        clock=clock,
        limits=ClientLimits(section.max_claims_per_client, section.max_pool_episodes),
    )
    if remote_sampler is not None:
        interchange.sample_without_trainer(folder.name, config.inference.policy_version)
    desk = TrainerMessageHandler(
        interchange=interchange, link=link, sampler=sampler, courier=courier, metrics=metrics, times=times
    )
    endpoints = Endpoints(
        interchange=interchange,
        book=book,
        link=link,
        claims=claims,
        metrics=metrics,
        public_base_url=section.public_base_url,
        max_metadata_bytes=section.max_metadata_bytes,
    )
    operator = OperatorEndpoints(interchange=interchange, book=book, link=link)
    engine_control = EngineControl(run_dir, interchange=interchange, link=link)
    app = create_app(endpoints, gateway, roles, section.max_body_bytes)
    admin = requires(roles, "admin")
    app.include_router(register_router(interchange, roles), tags=["interchange"])
    app.include_router(train_config_router(interchange.engine, run_dir, admin), tags=["engine"])
    app.include_router(engine_control.router(admin), tags=["engine"])
    app.include_router(operator.router(admin), tags=["operator"])
    return InterchangeServer(
        app=app,
        link=link,
        server_id=server_id,
        interchange=interchange,
        desk=desk,
        engine_control=engine_control,
        sampler=sampler,
        remote_sampler=remote_sampler,
        store=store,
    )


def create_app(endpoints: Endpoints, gateway: Gateway, roles: Roles, max_body_bytes: int) -> FastAPI:
    """The ASGI app with what rollout programs use: the endpoints of claims, and the gateway."""
    app = FastAPI(
        title="TinkerScript interchange server",
        version=__version__,
        responses={"4XX": {"model": RefusalResponse, "description": "Refused; the body says why."}},
    )
    refusals.install(app)
    add_endpoints(app, roles, endpoints.of_claims(), tags=["interchange"])
    app.add_middleware(ModelRoutes, routes=gateway.routes)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.include_router(endpoints.router(), tags=["interchange"])
    app.include_router(gateway.router)
    return app
