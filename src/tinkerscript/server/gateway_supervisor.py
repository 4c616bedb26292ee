"""`GatewayProcesses`: starts, restarts and stops the server's gateway processes.

A process's port stays open during a restart, so calls wait. No process outlives the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.access_tokens import TOKEN_VARIABLES
from tinkerscript.asgi import Refusals
from tinkerscript.config import RunConfig
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.http_server import http_server
from tinkerscript.lifecycle import GRACE_S, describe_exit, own_command, stop_child
from tinkerscript.sampler import Sampler
from tinkerscript.server.claims import LeasedClaims, gateway_path
from tinkerscript.server.gateway_channel import (
    Channel,
    ClaimService,
    ForgetClaim,
    FromGateway,
    Setup,
    StopServing,
)
from tinkerscript.server.metrics import ServerMetrics

# Doubles after each process that did not serve.
RESTART_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0

_PATH = re.compile("/g/([0-9]+)/.*")

logger = logging.getLogger(__name__)


class GatewayChild:
    def __init__(
        self,
        number: int,
        config: RunConfig,
        listener: socket.socket,
        environ: Mapping[str, str],
        claims: LeasedClaims,
        sampler: Sampler,
        *,
        any_host: bool,
        count_restart: Callable[[], None],
    ) -> None:
        """The caller closes `listener`."""
        self._number = number
        self._setup = Setup(config=config.model_dump_json().encode(), any_host=any_host)
        self._section = config.interchange_server
        self._listener = listener
        self._environ = environ
        self._claims = claims
        self._sampler = sampler
        self._count_restart = count_restart
        self._channel: Channel | None = None
        self._closing = False

    def forget(self, episode_uuid: str, attempt: int) -> None:
        if self._channel is not None:
            self._channel.send(ForgetClaim(episode_uuid=episode_uuid, attempt=attempt))

    def stop(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.send(StopServing())

    async def run(self) -> None:
        """Keep it running until `stop`. Kill it if cancelled."""
        pause_s = RESTART_PAUSE_S
        while not self._closing:
            try:
                served, how = await self._run_once()
            except OSError as error:  # Too many processes or open files.
                served, how = False, str(error)
            if self._closing:
                return
            pause_s = RESTART_PAUSE_S if served else min(2 * pause_s, MAX_PAUSE_S)
            logger.warning("gateway.died number=%d how=%s restart_in_s=%g", self._number, how, pause_s)
            self._count_restart()
            if served:
                await asyncio.sleep(pause_s)
            else:
                await self._refuse(pause_s, f"the gateway process of this claim does not start: {how}")

    async def _refuse(self, seconds: float, why: str) -> None:
        path = gateway_path(self._number)
        refusals = Refusals({f"{path}{model}": body for model, body in REFUSAL_BODIES.items()})

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            await refusals.refuse(Request(scope), 503, why)(scope, receive, send)

        http = http_server(refuse, self._section)
        serving = asyncio.create_task(http.serve(sockets=[self._listener.dup()]))
        try:
            await asyncio.sleep(seconds)
        finally:
            http.should_exit = True
            await asyncio.shield(serving)  # Cancelling it would leave sockets open.

    async def _run_once(self) -> tuple[bool, str]:
        began, served = time.monotonic(), False
        ours, theirs = socket.socketpair()

        def ready() -> None:
            nonlocal served
            served = True
            logger.info("gateway.ready number=%d after_s=%.2f", self._number, time.monotonic() - began)
            if self._closing:
                channel.send(StopServing())

        channel = Channel(FromGateway, lambda message: service.take(message))
        service = ClaimService(self._number, self._claims, self._sampler, send=channel.send, ready=ready)
        try:
            with theirs:
                process = await self._start(theirs)
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
                self._channel = channel
                channel.send(self._setup)
                await process.wait()
            finally:
                await asyncio.shield(stop_child(process, 0.0))
            return served, describe_exit(process.returncode or 0)
        finally:
            self._channel = None
            channel.close()
            ours.close()
            await service.close()

    async def _start(self, channel: socket.socket) -> Process:
        files = channel.fileno(), self._listener.fileno()
        process = await asyncio.create_subprocess_exec(
            *own_command(
                "gateway", f"--number={self._number}", f"--channel={files[0]}", f"--listener={files[1]}"
            ),
            stdin=PIPE,
            pass_fds=files,
            start_new_session=True,  # Ctrl-C is for the server.
            env=self._environ,
        )
        logger.info("gateway.started number=%d pid=%d", self._number, process.pid)
        return process


class GatewayProcesses:
    def __init__(
        self,
        config: RunConfig,
        listeners: Sequence[socket.socket],
        *,
        environ: Mapping[str, str],
        claims: LeasedClaims,
        sampler: Sampler,
        metrics: ServerMetrics,
        any_host: bool,
    ) -> None:
        """`environ` is added to the server's environment. `any_host`: see `asgi.problem_with_site`."""
        outside = {role.api_key_env for role in config.roles.values() if role.kind == "outside"}
        not_theirs = {*TOKEN_VARIABLES, *config.key_variables} - outside
        inherited = {name: value for name, value in (os.environ | environ).items() if name not in not_theirs}
        self._children = [
            GatewayChild(
                number,
                config,
                listener,
                inherited,
                claims,
                sampler,
                any_host=any_host,
                count_restart=metrics.count_gateway_restart,
            )
            for number, listener in enumerate(listeners, 1)
        ]
        self.ports: tuple[int, ...] = tuple(listener.getsockname()[1] for listener in listeners)
        self._ended = asyncio.Event()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(child.run())
        finally:
            self._ended.set()

    def forget(self, episode_uuid: str, attempt: int) -> None:
        for child in self._children:
            child.forget(episode_uuid, attempt)

    def stop(self) -> None:
        for child in self._children:
            child.stop()

    async def ended(self) -> None:
        try:
            async with asyncio.timeout(2 * GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("gateway.slow detail=a process did not end in %d s and is killed", 2 * GRACE_S)


class GatewayPaths:
    def __init__(self, app: ASGIApp, *, ports: Sequence[int], refusals: Refusals) -> None:
        self._app = app
        self._ports = ports
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        listed = ", ".join(f"{gateway_path(n)}/ to port {port}" for n, port in enumerate(self._ports, 1))
        why = f"each gateway process has its own port: send {listed} (interchange_server.processes)"
        await self._refusals.refuse(Request(scope), 404, why)(scope, receive, send)
