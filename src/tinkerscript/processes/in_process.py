"""A run in one process (`enable_tinkerscript_mode: false`), with server and worker as the trainer's tasks.

The worker calls the server's app directly; others use its socket.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from tinkerscript.access_tokens import CLIENT_TOKEN, read_token
from tinkerscript.addresses import ServerInfo
from tinkerscript.asgi import ask
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.client.exchange import HttpRequest, Reply, Response
from tinkerscript.config import RunConfig
from tinkerscript.lifecycle import collect_less_often
from tinkerscript.processes.children import remember_worker
from tinkerscript.server.process import Gate, running_server
from tinkerscript.trainer_link.trainer_end import TrainerLink
from tinkerscript.workers.chat_endpoint import ChatAttempt, ChatEndpoint, retry_after_s
from tinkerscript.workers.worker import WorkerOptions, open_runner

Failed = Callable[[Exception], None]


class ServerHere:
    def __init__(self, config: RunConfig, folder: Path, failed: Failed) -> None:
        self._config = config
        self._folder = folder
        self._failed = failed
        self._gate = Gate()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[ServerInfo]:
        serving = running_server(self._config, self._folder, environ=os.environ, gate=self._gate)
        async with serving as (info, task):
            task.add_done_callback(self._report)
            yield info

    @asynccontextmanager
    async def working(self, link: TrainerLink, url: str) -> AsyncGenerator[None]:
        """Run up to `workers.concurrency` episodes at once. Raises WorkerError."""
        workers, name = self._config.workers, f"{link.own_clients}0-0"
        tasks = [] if workers.script else self._config.all_tasks
        options = WorkerOptions(
            server_url=url,
            script=workers.script,
            tasks={task.name: task.train_args for task in tasks},
            eval_args={task.name: task.eval_args for task in tasks},
            sandboxes={task.name: task.sandbox for task in tasks},
            concurrency=workers.concurrency,
        )
        client = _Client(
            self._gate,
            url,
            client_uuid=name,
            token=read_token(os.environ, CLIENT_TOKEN),
            allow_discard_timeout=workers.allow_discard_timeout,
        )
        remember_worker(self._folder, name)
        collect_less_often()
        async with open_runner(options, client=client, endpoint=_Endpoint(self._gate)) as runner:
            task = asyncio.create_task(runner.run(), name="worker")
            task.add_done_callback(self._report)
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _report(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)


class _Client(AsyncTinkerScriptClient):
    def __init__(
        self, app: ASGIApp, url: str, *, client_uuid: str, token: str | None, allow_discard_timeout: float
    ) -> None:
        super().__init__(
            url, client_uuid=client_uuid, token=token or "", allow_discard_timeout=allow_discard_timeout
        )
        self._app = app

    def with_timeout(self, timeout_s: float | None) -> AsyncTinkerScriptClient:
        return self

    async def send(self, request: HttpRequest) -> Reply:
        headers = self.settings.headers() | request.headers
        url = f"{self.settings.server_url}{request.path}"
        answer = await ask(self._app, request.method, url, headers, request.body)
        return Response(answer.status, answer.headers, answer.body)


class _Endpoint(ChatEndpoint):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def whole(self, url: str, data: bytes | None, headers: dict[str, str]) -> ChatAttempt[bytes]:
        method = "GET" if data is None else "POST"
        answer = await ask(self._app, method, url, headers, data)
        if answer.status == 200:
            return ChatAttempt(200, b"", answer.body, None)
        return ChatAttempt(answer.status, answer.body, None, retry_after_s(answer.headers.get("retry-after")))
