"""A rollout: the user's function, plain or async, run for one episode, and what it may return."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import cast

from pydantic import JsonValue

from tinkerscript.client.episode import Episode
from tinkerscript.client.heartbeats import HeldClaim
from tinkerscript.protocol import WorkflowOutput

RolloutResult = float | WorkflowOutput | tuple[float, dict[str, JsonValue]]
"""What a rollout returns: a reward, a reward with metadata, or the whole output."""

RolloutFunction = Callable[[Episode], RolloutResult] | Callable[[Episode], Awaitable[RolloutResult]]
"""A plain function (run on a thread of its own) or an async function."""


def as_output(result: object) -> WorkflowOutput:
    """A rollout's result as a WorkflowOutput. Raises TypeError, with the type, for anything else."""
    if isinstance(result, WorkflowOutput):
        return result
    if isinstance(result, int | float):
        return WorkflowOutput(reward=float(result))
    match result:
        case (int() | float() as reward, dict() as metadata):
            return WorkflowOutput(reward=float(reward), metadata=cast("dict[str, JsonValue]", metadata))
        case _:
            raise TypeError(
                "a rollout returns a number, (number, metadata) or a WorkflowOutput, "
                f"not {type(result).__name__}"
            )


async def run_rollout(rollout: RolloutFunction, held: HeldClaim) -> object:
    """Run `rollout` for the episode that is held; returns its result.

    Raises what it raises, and ClaimLostError if a heartbeat learns meanwhile that the claim is lost.
    """
    if _is_async(rollout):
        result: object = None
        async with held.canceling_the_block():
            result = await cast("Callable[[Episode], Awaitable[object]]", rollout)(held.episode)
    else:
        result = await _in_thread(cast("Callable[[Episode], object]", rollout), held.episode)
    held.episode.check()
    return result


async def _in_thread(rollout: Callable[[Episode], object], episode: Episode) -> object:
    """Run a plain function on a daemon thread: a rollout that never returns cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = rollout(episode)
        except BaseException as error:  # noqa: BLE001 - raised again by the task that waits for this thread
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=f"rollout-{episode.episode_uuid}", daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result


def _is_async(rollout: RolloutFunction) -> bool:
    """Whether calling `rollout`, a function or an object with `__call__`, gives an awaitable."""
    return inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__)
