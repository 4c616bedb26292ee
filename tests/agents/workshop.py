"""`Workshop`: a server, the scripted model on its link, and workers as people start them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import mender
import story
from oracle import check_exact
from scripted_model import Logged
from stage import Stage, open_stage

from inspect_tinker_bridge import load_inspect_task
from inspect_tinker_bridge.conversion import sample_summary
from interchange_helpers import eventually, new_episode
from run_ledger import used
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome

TASK = f"{Path(__file__).with_name('mending.py')}@mend"
DEADLINE_S = 400.0
DECOY = "decoy-in-the-workers-environment"


@dataclass
class Workshop:
    """A server, the model behind it, and a place for workers."""

    stage: Stage
    folder: Path
    workers: int = 0

    def plays(self, script: list[str] | tuple[str, ...]) -> None:
        """From now on the model says this, to everybody."""
        self.stage.model.reset()
        story.answer = mender.answering(script)

    async def register(self, number: int) -> list[str]:
        """Episodes of the task; their uuids."""
        info = load_inspect_task(TASK)
        payload = {"task": info.task_id, "sample": sample_summary(info.samples[0])}
        episodes = [new_episode(payload=json.dumps(payload).encode()) for _ in range(number)]
        await self.stage.link.register(episodes)
        return [episode.episode_uuid for episode in episodes]

    @asynccontextmanager
    async def worker(
        self, agent: str, *, at_once: int, time_limit_s: float = 300.0
    ) -> AsyncGenerator[Worker]:
        """`tinkerscript worker --agent`, with a folder for its temporary files; stopped at the end."""
        self.workers += 1
        place = self.folder / f"w{self.workers}"
        place.mkdir()
        options = [
            "--agent",
            agent,
            "--task",
            TASK,
            "--concurrency",
            str(at_once),
            "--time-limit",
            str(time_limit_s),
        ]
        server = str(self.stage.http.base_url).rstrip("/")
        with (self.folder / f"{self.workers}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tinkerscript", "worker", *options, "--server", server),
                env={**os.environ, "TMPDIR": str(place), "SOME_API_KEY": DECOY},
                stdout=log,
                stderr=log,
            )
        worker = Worker(process, place, Path(log.name))
        try:
            yield worker
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await process.wait()
        await eventually(worker.left_nothing, "the end of the worker's processes and files")

    async def outcomes(self, uuids: list[str], worker: Worker, within_s: float) -> dict[str, Outcome]:
        """The outcomes of these episodes, which a commit has used."""
        found: dict[str, Outcome] = {}
        async with asyncio.timeout(within_s):
            while not found.keys() >= set(uuids):
                try:
                    async with asyncio.timeout(1.0):
                        news = await self.stage.link.outcomes()
                except TimeoutError:
                    assert worker.process.returncode is None, worker.said()
                    continue
                await self.stage.link.commit(used(news))
                found |= {outcome.episode_uuid: outcome for outcome in news}
        return found

    async def results(
        self, uuids: list[str], worker: Worker, *, within_s: float = DEADLINE_S
    ) -> list[EpisodeAccepted]:
        outcomes = (await self.outcomes(uuids, worker, within_s)).values()
        for outcome in outcomes:
            assert isinstance(outcome, EpisodeAccepted), (outcome, worker.said())
        return [outcome for outcome in outcomes if isinstance(outcome, EpisodeAccepted)]

    def check_calls(self, results: list[EpisodeAccepted], *, sequences: int) -> None:
        """What was captured is what was sampled; each token is in one of an episode's sequences."""
        recorded = [logged for result in results for logged in logged_calls(result.calls)]
        assert Counter(recorded) == Counter(self.stage.model.log)
        for result in results:
            check_exact(result.calls, logged_calls(result.calls), sequences=sequences)


def logged_calls(calls: list[Call]) -> list[Logged]:
    prompts = full_prompts(calls)
    return [Logged(prompts[call.call_id], call.sampled, call.logprobs) for call in calls]


@dataclass
class Worker:
    """One worker process."""

    process: asyncio.subprocess.Process
    folder: Path
    """Its temporary files."""

    log: Path

    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def sandboxed(self) -> list[str]:
        """Command lines of the processes in the worker's sandboxes, and of those that wait to remove them."""
        mark = str(self.folder).encode()
        spaces = {space for pid, line in _processes() if mark in line and (space := _pid_namespace(pid))}
        ours = _pid_namespace(os.getpid())
        spaces.discard(ours)
        found = [line for pid, line in _processes() if mark in line or _pid_namespace(pid) in spaces]
        return [line.decode(errors="replace") for line in found]

    async def left_nothing(self) -> bool:
        # A killed worker leaves the folder of its Inspect eval, in which agents have no part.
        return not self.sandboxed() and not [*self.folder.glob("tinkerscript-sandboxes-*")]


def _processes() -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended meanwhile.
    return found


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


@asynccontextmanager
async def open_workshop(folder: Path, *, context: int = 400_000) -> AsyncGenerator[Workshop]:
    async with open_stage(folder, seed=1, context=context) as stage:
        yield Workshop(stage, folder)
