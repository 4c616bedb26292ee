"""The gateway processes as the server sees them: started, restarted, given their connections, and ended.

Invariants: a claim belongs to one process, which follows from the server's secret; a connection for a process
that is starting waits at most `HOLD_S`, and is then refused with the reason; none outlives the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.asgi import Refusals
from tinkerscript.config import RunConfig
from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.gateway.sampler import Sampler
from tinkerscript.lifecycle import GRACE_S, describe_exit, own_command, stop_child
from tinkerscript.server.auth import TOKEN_VARIABLES
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.server.gateways.channel import Channel, ForgetClaim, FromGateway, Setup, StopServing
from tinkerscript.server.gateways.claim_desk import ClaimDesk
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.passing import Adopt, Door, PassOn

HOLD_S = 20.0
"""Seconds that a connection waits for a process that starts, which takes a second or two, or more on a busy
machine."""

MAX_WAITING = 1024
"""Connections that may wait for one process."""

PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
"""Seconds before a process is started again: the first after one that served, twice as many after each that
did not."""

_PATH = re.compile("/g/[0-9]+(/.*)")
_OF_GATEWAY = re.compile(rb"/g/([1-9][0-9]{0,2})(?:%b)?/v1/" % AGENT_PREFIX.encode())

logger = logging.getLogger(__name__)


class GatewayChild:
    """One process: the incarnation that runs, and the connections that wait for it."""

    def __init__(
        self,
        number: int,
        config: RunConfig,
        environ: Mapping[str, str],
        claims: LeasedClaims,
        sampler: Sampler,
        *,
        count_restart: Callable[[], None],
    ) -> None:
        self._number = number
        self._setup = Setup(config=config.model_dump_json().encode())
        self._environ = environ
        self._claims = claims
        self._sampler = sampler
        self._count_restart = count_restart
        self._channel: Channel | None = None
        self._door: Door | None = None
        """While the process serves."""

        self._held: list[tuple[int, bytes]] = []
        self._adopt: Adopt | None = None
        self._down_since = time.monotonic()
        self._closing = False
        self.problem = "it is starting"
        """Why it does not serve."""

    def route(self) -> PassOn | None:
        """Where its connections go; None if they are to be refused: it is away, or does not take those that
        wait."""
        if self._door is not None:
            return self._door.pass_on if self._door.waiting < MAX_WAITING else None
        waits = not self._closing and time.monotonic() - self._down_since < HOLD_S
        return self._hold if waits and len(self._held) < MAX_WAITING else None

    def _hold(self, connection: int, data: bytes) -> None:
        if not self._held:
            asyncio.get_running_loop().call_later(HOLD_S, self._refuse_held)
        self._held.append((connection, data))

    def forget(self, episode_uuid: str, attempt: int) -> None:
        if self._channel is not None:
            self._channel.send(ForgetClaim(episode_uuid=episode_uuid, attempt=attempt))

    def stop(self) -> None:
        """Let it answer what it has, and end."""
        self._closing = True
        self.problem = "the server is stopping"
        self._refuse_held()
        if self._channel is not None:
            self._channel.send(StopServing())

    async def run(self, adopt: Adopt) -> None:
        """Keep it running until it was stopped; cancelled, end it at once. `adopt`: takes what it refuses."""
        self._adopt = adopt
        pause_s = PAUSE_S
        try:
            while not self._closing:
                try:
                    served, how = await self._run_once(adopt)
                except OSError as error:  # No process, or too many open files.
                    served, how = False, str(error)
                if self._closing:
                    return
                pause_s = PAUSE_S if served else min(2 * pause_s, MAX_PAUSE_S)
                self.problem = f"it ended ({how}) and starts again"
                logger.warning("gateway.died number=%d how=%s restart_in_s=%g", self._number, how, pause_s)
                self._count_restart()
                await asyncio.sleep(pause_s)
        finally:
            self._closing = True
            self._refuse_held()

    async def _run_once(self, adopt: Adopt) -> tuple[bool, str]:
        """Run it until it ends; whether it served, and how it ended."""
        began, served = time.monotonic(), False
        ours, theirs = socket.socketpair()
        door, their_door = socket.socketpair()

        def ready() -> None:
            nonlocal served
            served = True
            logger.info("gateway.ready number=%d after_s=%.2f", self._number, time.monotonic() - began)
            self._open(Door(door, adopt))

        channel = Channel(FromGateway, lambda message: desk.take(message))
        desk = ClaimDesk(self._number, self._claims, self._sampler, send=channel.send, ready=ready)
        try:
            with theirs, their_door:
                process = await self._start(theirs, their_door)
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
                self._channel = channel
                channel.send(self._setup)
                await process.wait()
            finally:
                self._close_door()
                await asyncio.shield(stop_child(process, 0.0))
            return served, describe_exit(process.returncode or 0)
        finally:
            self._channel = None
            channel.close()
            ours.close()
            door.close()
            await desk.close()

    async def _start(self, channel: socket.socket, door: socket.socket) -> Process:
        ends = channel.fileno(), door.fileno()
        process = await asyncio.create_subprocess_exec(
            *own_command("gateway", f"--number={self._number}", f"--channel={ends[0]}", f"--door={ends[1]}"),
            stdin=PIPE,
            pass_fds=ends,
            start_new_session=True,  # Ctrl-C in the terminal is for the server.
            env=self._environ,
        )
        logger.info("gateway.started number=%d pid=%d", self._number, process.pid)
        return process

    def _open(self, door: Door) -> None:
        self._door = door
        self.problem = f"{MAX_WAITING} connections wait for it"
        if self._closing and self._channel is not None:
            self._channel.send(StopServing())
        held, self._held = self._held, []
        for connection, data in held:
            door.pass_on(connection, data)

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            self._down_since = time.monotonic()
            door.close()

    def _refuse_held(self) -> None:
        held, self._held = self._held, []
        for connection, data in held:
            if self._adopt is None:
                os.close(connection)
            else:  # There is no route any more, so the server itself answers.
                self._adopt(socket.socket(fileno=connection), data)


class GatewayProcesses:
    """All of them. `run` owns them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        environ: Mapping[str, str],
        claims: LeasedClaims,
        sampler: Sampler,
        metrics: ServerMetrics,
    ) -> None:
        """`environ`: what is set for the server besides this process' own environment."""
        outside = {role.api_key_env for role in config.roles.values() if role.kind == "outside"}
        not_theirs = {*TOKEN_VARIABLES, *config.key_variables} - outside
        inherited = {name: value for name, value in (os.environ | environ).items() if name not in not_theirs}
        self._children = [
            GatewayChild(
                number, config, inherited, claims, sampler, count_restart=metrics.count_gateway_restart
            )
            for number in range(1, config.interchange_server.processes + 1)
        ]
        self._ended = asyncio.Event()

    async def run(self, adopt: Adopt) -> None:
        """Run them until `stop` and their end, or until cancelled. `adopt`: takes what they give back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(child.run(adopt))
        finally:
            self._ended.set()

    def route(self, target: bytes) -> PassOn | None:
        """What answers a request, from the beginning of its target; None: the server itself."""
        child = self._child(target)
        return None if child is None else child.route()

    def _child(self, target: bytes) -> GatewayChild | None:
        found = _OF_GATEWAY.match(target)
        number = int(found[1]) if found else 0
        return self._children[number - 1] if 0 < number <= len(self._children) else None

    def refusal(self, request: Request, refusals: Refusals) -> JSONResponse:
        """The answer to a request for a process that does not serve, or that there is not."""
        child = self._child(request.url.path.encode())
        if child is None:
            number = len(self._children)
            return refusals.refuse(
                request, 404, f"there are {number} gateway processes here (interchange_server.processes)"
            )
        return refusals.refuse(
            request, 503, f"the gateway process of this claim does not serve: {child.problem}"
        )

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """A claim is over."""
        for child in self._children:
            child.forget(episode_uuid, attempt)

    def stop(self) -> None:
        """Answer what is there, and end: the server is shutting down."""
        for child in self._children:
            child.stop()

    async def ended(self) -> None:
        """Return when `run` has ended, or after the time that open requests have."""
        try:
            async with asyncio.timeout(2 * GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("gateway.slow detail=a process did not end in %d s and is killed", 2 * GRACE_S)


class GatewayPaths:
    """ASGI middleware for requests under the path of a gateway process that have come to the server itself.

    Those for the server are answered as without that path, which a program may have in front of everything.
    """

    def __init__(self, app: ASGIApp, *, gateways: GatewayProcesses, refusals: Refusals) -> None:
        self._app = app
        self._gateways = gateways
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _PATH.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
        elif found[1].startswith(("/v1/", f"{AGENT_PREFIX}/v1/")):
            await self._gateways.refusal(Request(scope), self._refusals)(scope, receive, send)
        else:
            path: str = found[1]
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
