"""How a client's program is driven: one feature a job, each in a fork with the job's environment.

A program imports its library once and calls `serve(...)` with functions that are named for features;
`conversations` makes those that are talks with its agent loop. A job is a line of JSON on stdin: {"feature",
"environ", "package", "snippet", "result"}. What the function returns goes, as JSON, into the file `result`:
{"value", "version"}, or {"error"} for an exception of the library, and the modules "imported". The feature
`snippet` runs the job's code, which finds an `episode` and leaves a `text`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from travel import AGAIN, BROKEN, CONVERSATION, SHORT

Feature = Callable[[], Any]
SNIPPET = "snippet"


def conversations(agent: Callable[..., Any]) -> tuple[Feature, ...]:
    """The features that are talks with an agent, which takes the questions and whether it streams."""

    def talk(questions: tuple[str, ...], *, stream: bool = False) -> Any:
        told = agent(questions, stream=stream)
        return asyncio.run(told) if inspect.iscoroutine(told) else told

    def conversation() -> Any:
        return talk(CONVERSATION)

    def streaming() -> Any:
        return talk(CONVERSATION, stream=True)

    def broken_call() -> Any:
        return talk((BROKEN, AGAIN))

    def retry() -> Any:
        """One question, which the server refuses at first: libraries ask again by themselves."""
        return talk((SHORT,))

    async def thrice() -> Any:
        found = await asyncio.gather(*(agent(CONVERSATION, stream=False) for _ in range(3)))
        return {"texts": [text for each in found for text in each["texts"]]}

    def parallel() -> Any:
        """Three equal conversations of one episode at once, as sub-agents have them."""
        return asyncio.run(thrice())

    return conversation, streaming, broken_call, retry, parallel


def serve(*features: Feature) -> None:
    """Run jobs until stdin ends."""
    table = {feature.__name__: feature for feature in features}
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(table, job))
        os.waitpid(child, 0)
        _import_like(Path(job["result"]))
        print("done", flush=True)


def _import_like(result: Path) -> None:
    """Import what a fork has imported, so that later ones need not: libraries import for seconds as they run.

    There is no result of a fork that crashed.
    """
    for name in json.loads(result.read_text())["imported"] if result.exists() else ():
        with suppress(Exception):
            importlib.import_module(name)


def _run(table: dict[str, Feature], job: dict[str, Any]) -> int:
    os.environ.update(job["environ"])
    before = {*sys.modules}
    try:
        value = _snippet(job) if job["feature"] == SNIPPET else table[job["feature"]]()
        outcome: dict[str, Any] = {"value": value, "version": version(job["package"])}
    except Exception as error:  # noqa: BLE001 - the test decides which errors are right.
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    outcome["imported"] = [name for name in sys.modules if name not in before]
    path = Path(job["result"])
    path.with_suffix(".part").write_text(json.dumps(outcome))
    path.with_suffix(".part").rename(path)
    sys.stderr.flush()
    return 0


def _snippet(job: dict[str, Any]) -> Any:
    """The documented lines, with the episode of the job and without its environment."""
    url, key = (os.environ.pop(name) for name in job["environ"] if name != "CLIENT_API")
    episode = SimpleNamespace(
        openai_base_url=url, anthropic_base_url=url.removesuffix("/v1"), openai_api_key=key
    )
    names: dict[str, Any] = {"episode": episode}
    exec(job["snippet"], names)
    return {"texts": [names["text"]]}


def refusals(asked: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The status and message of each request that the server refuses; empty for one that it served."""
    found: dict[str, str] = {}
    for name, ask in asked.items():
        try:
            ask()
            found[name] = ""
        except Exception as error:  # noqa: BLE001 - the test looks at what came.
            found[name] = _message(error)
    return found


def _message(error: Any) -> str:
    """Both SDKs keep the body of the reply; Anthropic's holds the error a level deeper."""
    body = error.body.get("error", error.body)
    return f"{error.status_code} {body['message']}"
