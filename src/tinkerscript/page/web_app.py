"""The page as an ASGI app: files, API and server-sent events.

Explicit actions are in the run's audit log, deletions in the parent folder's.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from tinkerscript import __version__
from tinkerscript.asgi import BodyLimit, Refusals
from tinkerscript.errors import ConfigError, ConflictError, NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page import curves as curve_view
from tinkerscript.page.access import SESSION_S, PageAccess, PageSessions, read_audit, write_audit
from tinkerscript.page.annotation import Annotation, write_annotation
from tinkerscript.page.curves import (
    AlignmentView,
    ConfigDifference,
    Curves,
    FindingPage,
    Metric,
    alignment_view,
    found_in,
)
from tinkerscript.page.episode_view import EpisodeView, episode_view
from tinkerscript.page.export import PAGE_FILES
from tinkerscript.page.held_out import Comparison, ComparisonQuery, SampleView, compare, sample_view
from tinkerscript.page.lines import EpisodePage, SearchPage, Show, newest, search
from tinkerscript.page.overview import (
    Evaluation,
    RunEvents,
    RunList,
    RunView,
    evaluations,
    overview,
    run_list,
)
from tinkerscript.page.runs import Runs, RunServer
from tinkerscript.page.steps import GroupFilter, Step, StepPage, step_page, step_view
from tinkerscript.page.token_view import Tokens, token_view
from tinkerscript.page.transcript_view import TranscriptView, transcript_view

Before = Annotated[int | None, Query(ge=1, description="Where to continue: `next` of the previous page.")]
Offset = Annotated[int, Query(ge=0, description="Where to continue: `next` of the previous page.")]
Limit = Annotated[int, Query(ge=1, le=200, description="Maximum number of items in the reply.")]


PAGE_BODY_BYTES = 2**20


class Token(BaseModel):
    token: str


class LoginState(BaseModel):
    needed: bool
    entered: bool


class FailedEpisodes(BaseModel):
    episode_uuids: list[str] = Field(min_length=1, max_length=1000)


class Deletion(BaseModel):
    name: str = Field(description="The run's name, repeated for confirmation.")


def create_page(root: Path, *, admin_token: str | None) -> FastAPI:
    """Without an `admin_token`, anyone who uses a loopback name may enter."""
    sessions = PageSessions(admin_token)
    runs = Runs(root, admin_token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await runs.close()

    app = FastAPI(
        title="TinkerScript page",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    refusals = Refusals({})
    refusals.install(app)
    app.add_exception_handler(NotRecordedError, _not_found)
    app.add_exception_handler(ConfigError, _not_found)
    app.add_middleware(BodyLimit, max_bytes=PAGE_BODY_BYTES, refusals=refusals)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=5)
    app.add_middleware(PageAccess, sessions=sessions)
    app.include_router(_Page(runs, sessions).router())
    app.mount("/page", StaticFiles(directory=PAGE_FILES))
    return app


async def _not_found(request: Request, error: Exception) -> JSONResponse:
    del request
    return JSONResponse({"success": False, "failure_reason": str(error)}, 404)


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConflictError(
            f"the page, which runs as user {os.geteuid()}, cannot change {folder}: "
            f"{error.strerror or error} ({error.filename})"
        ) from error


class _Page:
    # FastAPI runs plain functions in threads, so reading the ledger does not block.

    def __init__(self, runs: Runs, sessions: PageSessions) -> None:
        self._runs = runs
        self._sessions = sessions
        self._events: dict[str, RunEvents] = {}

    def router(self) -> APIRouter:
        router = APIRouter()
        get, post = router.get, router.post
        get("/", include_in_schema=False)(self.index)
        get("/favicon.ico", include_in_schema=False)(self.icon)
        get("/api/session", tags=["session"])(self.session)
        post("/api/login", tags=["session"])(self.login)
        post("/api/logout", tags=["session"])(self.logout)
        get("/api/runs", tags=["runs"])(self.list_runs)
        get("/api/config-differences", tags=["runs"])(self.differences)
        run = "/api/runs/{run}"
        get(run, tags=["runs"])(self.overview)
        post(f"{run}/annotation", tags=["runs"])(self.annotate)
        post(f"{run}/delete", tags=["runs"])(self.delete)
        get(f"{run}/events", tags=["runs"], response_class=StreamingResponse)(self.events)
        get(f"{run}/config", tags=["runs"])(self.config)
        get(f"{run}/metrics", tags=["runs"])(self.metrics)
        get(f"{run}/curves", tags=["runs"])(self.curves)
        get(f"{run}/steps", tags=["steps"])(self.steps)
        get(f"{run}/steps/{{step}}", tags=["steps"])(self.step)
        get(f"{run}/evaluations", tags=["evaluations"])(self.evaluations)
        get(f"{run}/comparison", tags=["evaluations"])(self.comparison)
        get(f"{run}/samples/{{digest}}", tags=["samples"])(self.sample)
        get(f"{run}/episodes", tags=["episodes"])(self.episodes)
        get(f"{run}/search", tags=["episodes"])(self.search)
        get("/api/episodes/{uuid}", tags=["episodes"])(self.episode)
        get("/api/episodes/{uuid}/tokens", tags=["episodes"])(self.tokens)
        get("/api/episodes/{uuid}/transcript", tags=["episodes"])(self.transcript)
        get(f"{run}/alignment", tags=["alignment"])(self.alignment)
        get(f"{run}/alignment/{{kind}}/{{name}}", tags=["alignment"])(self.found)
        get(f"{run}/fleet", tags=["fleet"])(self.fleet)
        post(f"{run}/failed_episodes/{{action}}", tags=["fleet"])(self.failed_episodes)
        get(f"{run}/audit", tags=["runs"])(self.audit)
        return router

    def _ledger(self, run: str) -> LedgerReader:
        return self._runs.ledger(run)

    async def index(self) -> Response:
        return FileResponse(PAGE_FILES / "index.html", headers={"cache-control": "no-cache"})

    async def icon(self) -> Response:
        return FileResponse(PAGE_FILES / "icon.svg", media_type="image/svg+xml")

    def session(self, request: Request) -> LoginState:
        """Whether the caller is logged in."""
        return LoginState(needed=self._sessions.are_needed, entered=self._sessions.may_enter(request.headers))

    async def login(self, body: Token, request: Request, response: Response) -> LoginState:
        """Log in with the admin token, for a cookie."""
        try:
            is_right = self._sessions.admits(body.token)
        except UnicodeEncodeError as error:  # JSON allows lone surrogates.
            raise HTTPException(400, "the token is not Unicode text") from error
        if not is_right:
            await asyncio.sleep(0.5 + random.random() / 2)  # Slow down guessing.
            response.status_code = 401
            return LoginState(needed=True, entered=False)
        secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        response.set_cookie(
            self._sessions.cookie_name,
            self._sessions.cookie(),
            max_age=SESSION_S,
            path=None,  # The API's path as the browser sees it.
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return LoginState(needed=self._sessions.are_needed, entered=True)

    def logout(self, response: Response) -> LoginState:
        """Forget the cookie."""
        response.set_cookie(self._sessions.cookie_name, "", max_age=0, path=None)
        return LoginState(needed=self._sessions.are_needed, entered=False)

    def list_runs(self) -> RunList:
        """The runs in the folder, newest first."""
        return run_list(self._runs.readable())

    def overview(self, run: str) -> RunView:
        """A run's first screen."""
        return overview(run, self._ledger(run))

    def annotate(self, run: str, body: Annotation, request: Request) -> Annotation:
        """Replace a run's note and tags."""
        folder = self._ledger(run).folder
        with _writing(folder):
            write_annotation(folder, body)
            write_audit(folder, request, "annotate", body.model_dump())
        return body

    def delete(self, run: str, body: Deletion, request: Request) -> RunList:
        """Delete a run that is not in progress, with its checkpoints. The reply lists the other runs."""
        if body.name != run:
            raise ConflictError(f"to delete {run}, repeat its name; got {body.name!r}")
        with _writing(self._runs.root / run):
            self._runs.delete(run)
            write_audit(self._runs.root, request, "delete", {"run": run})
        self._events.pop(run, None)
        return self.list_runs()

    async def events(self, run: str, request: Request) -> StreamingResponse:
        """Server-sent events: `run` with the first screen after each change, at most once a second."""
        ledger = await asyncio.to_thread(self._ledger, run)
        if run not in self._events:
            self._events[run] = RunEvents(run, ledger)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-encoding": "identity"}
        stream = self._events[run].stream(request.is_disconnected)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    def config(self, run: str) -> dict[str, Any]:
        """The whole config of a run."""
        return self._ledger(run).config

    def differences(self, run: Annotated[list[str], Query()]) -> list[ConfigDifference]:
        """The settings that differ between runs or, for a single run, from the defaults."""
        return curve_view.config_differences({name: self.config(name) for name in run})

    def metrics(self, run: str) -> list[Metric]:
        """Every metric with its newest value."""
        return curve_view.metrics(self._ledger(run))

    def curves(
        self,
        run: str,
        name: Annotated[list[str], Query(max_length=100)],
        points: Annotated[int, Query(ge=2, le=curve_view.MAX_POINTS)] = 400,
    ) -> Curves:
        """Curves of metrics, each with at most `points` points."""
        return curve_view.curves(self._ledger(run), name, points=points)

    def steps(self, run: str, before: Before = None, limit: Limit = 50) -> StepPage:
        """Training steps, newest first."""
        return step_page(self._ledger(run), before=before, limit=limit)

    def step(self, run: str, step: int, show: GroupFilter = "all", offset: Offset = 0) -> Step:
        """One step: histogram, groups, metrics."""
        return step_view(self._ledger(run), step, show=show, offset=offset)

    def evaluations(self, run: str) -> list[Evaluation]:
        """All evaluations, in order."""
        return evaluations(self._ledger(run))

    def comparison(self, run: str, query: Annotated[ComparisonQuery, Query()]) -> Comparison:
        """Two evaluations sample by sample, by label; by default the first and the last."""
        return compare(self._ledger(run), query)

    def sample(self, run: str, digest: str, before: Before = None, limit: Limit = 50) -> SampleView:
        """One sample over the policy's versions."""
        return sample_view(self._ledger(run), digest, before=before, limit=limit)

    def episodes(self, run: str, show: Show = "all", before: Before = None, limit: Limit = 50) -> EpisodePage:
        """Episodes, newest first."""
        return newest(self._ledger(run), show=show, before=before, limit=limit)

    def search(
        self, run: str, q: Annotated[str, Query(max_length=500)], before: Before = None, limit: Limit = 50
    ) -> SearchPage:
        """Episodes by words of their text, ids, and conditions such as `reward>0.5` or `score/exact=0`."""
        return search(self._ledger(run), q, before=before, limit=limit)

    def episode(self, uuid: str) -> EpisodeView:
        """One episode: conversation, scores, attempts, group."""
        run, ledger = self._runs.ledger_of(uuid)
        return episode_view(run, ledger, uuid)

    def tokens(
        self,
        uuid: str,
        sequence: Annotated[int, Query(ge=0)] = 0,
        start: Annotated[int, Query(ge=0)] = 0,
        end: Annotated[int | None, Query(ge=0)] = None,
        step: int | None = None,
    ) -> Tokens:
        """Tokens [start, end) of a training sequence, at most 8,192."""
        _, ledger = self._runs.ledger_of(uuid)
        return token_view(ledger, uuid, sequence, start=start, end=end, step=step)

    def transcript(
        self,
        uuid: str,
        attempt: Annotated[int | None, Query(ge=1, description="By default the last one.")] = None,
        offset: Offset = 0,
    ) -> TranscriptView:
        """The events of an Inspect episode: model calls, tools, scores, state, sandbox."""
        _, ledger = self._runs.ledger_of(uuid)
        return transcript_view(ledger, uuid, attempt=attempt, offset=offset)

    def alignment(self, run: str) -> AlignmentView:
        """Token alignment over time, and the findings."""
        return alignment_view(self._ledger(run))

    def found(self, run: str, kind: str, name: str) -> FindingPage:
        """The findings of one kind and name, with their episodes."""
        return found_in(self._ledger(run), kind, name)

    def _server(self, run: str) -> RunServer:
        return self._runs.server_of(self._ledger(run).folder)

    async def fleet(self, run: str) -> dict[str, Any]:
        """Queue, claims, workers and failures, as reported by the run's server."""
        return await self._server(run).fleet()

    async def failed_episodes(
        self, run: str, action: Literal["retry", "drop"], body: FailedEpisodes, request: Request
    ) -> dict[str, Any]:
        """Requeue failed episodes, or remove them from the list."""
        reply = await self._server(run).failed_episodes(action, body.episode_uuids)
        done = {"done": reply.get("done"), "refused": reply.get("refused")}
        write_audit(self._ledger(run).folder, request, f"{action} failed episodes", done)
        return reply

    def audit(self, run: str) -> list[dict[str, Any]]:
        """What was changed through the page, newest first."""
        return read_audit(self._ledger(run).folder)
