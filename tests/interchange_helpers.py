"""What the server's tests share: fast intervals, episodes, and waiting for a condition with a deadline."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.sampler import SampleFunction
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.keys import TrainerKeys
from tinkerscript.trainer_link.messages import NewEpisode, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink

FAST = LinkTimes(heartbeat_s=0.05, silence_s=1.5, grace_s=0.3, resend_s=0.1)
"""A trainer is missed soon, and what is lost is repeated soon."""

DEADLINE_S = 60.0


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str = "the condition", *, deadline_s: float = DEADLINE_S
) -> None:
    """Return when `await condition()` holds; fails after `deadline_s`."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not await condition():
        assert asyncio.get_running_loop().time() < end, f"{what} did not come about in {deadline_s} s"
        await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Return when `condition()` holds; fails after DEADLINE_S."""

    async def holds() -> bool:
        return condition()

    await eventually(holds, what)


def new_episode(name: str = "", kind: str = "train", payload: bytes = b'{"input": "1+1"}') -> NewEpisode:
    """One of the evaluation before training, or one that is planned for step 1."""
    return NewEpisode(
        episode_uuid=name or uuid.uuid4().hex,
        episode_type="eval" if kind == "eval" else "train",
        group_id="g",
        payload=payload,
        step=0 if kind == "eval" else 1,
        label="before" if kind == "eval" else "",
    )


def new_episodes(*names: str) -> list[NewEpisode]:
    return [new_episode(name) for name in names]


def scripted(ids: tuple[int, ...] = (5, 6)) -> ScriptedSampler:
    return ScriptedSampler(lambda prompt: list(ids))


def trainer(
    address: str,
    sampler: SampleFunction | None = None,
    *,
    trainer_id: str = "",
    keys: TrainerKeys | None = None,
    note: Callable[[str], None] | None = None,
) -> TrainerLink:
    return TrainerLink(
        address,
        trainer_id=trainer_id or uuid.uuid4().hex,
        model="fake",
        sampler=sampler or scripted().sample,
        times=FAST,
        keys=keys,
        note=note,
    )


async def collect(link: TrainerLink, number: int) -> dict[str, Outcome]:
    """The outcomes of `number` different episodes, by uuid, as a trainer gets them that has resumed."""
    found: dict[str, Outcome] = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < number:
            found |= {outcome.episode_uuid: outcome for outcome in await link.outcomes()}
    return found


def consumed(outcomes: Mapping[str, Outcome], step: int = 1) -> list[TrainedRow]:
    """The rows of a trainer that uses these in a step."""
    return [TrainedRow(episode=each.sequence, step=step, outcome=Use.TRAINED) for each in outcomes.values()]


def stored_outcomes(path: Path) -> dict[str, str]:
    """The status of every episode in a server's file, by uuid; also while it is served."""
    query = "SELECT uuid, iif(state = 'ended' AND consumed, 'accepted', state) FROM episodes"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return dict(connection.execute(query))


def run_config(model: Path, **interchange: object) -> RunConfig:
    """A config with a free port; `interchange` adds keys of `interchange_server`."""
    return RunConfig.model_validate(
        {
            "task": {"name": "none"},
            "engine": {"model": str(model)},
            "interchange_server": {"interchange_server_port": 0} | interchange,
        }
    )
