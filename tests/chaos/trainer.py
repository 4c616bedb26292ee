"""A trainer whose sampler is a fake: plans episodes for steps, answers samples, and commits each step into
the ledger.

    python tests/chaos/trainer.py --run-dir DIR --link ADDRESS --steps N --groups N

May be killed anywhere and started again: it resumes, as a trainer does, from the newest of its checkpoints,
each of which is a line of its log. Its log of samples is the oracle: for each a nonce that no other sample
has, and the exact ids that spell it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from evidence import ORACLE, TRAINER, Lines, read_lines

from tinkerscript.ledger.history import History
from tinkerscript.ledger.rows import CheckpointRow, PublicationRow, StepRow, TrainedRow, Use
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import ProgressCallback, SampledSequence, SampleRequest, SampleResult
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.trainer_link.messages import EpisodeAccepted, NewEpisode, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink

GROUP_SIZE = 8
EXTRA_GROUPS = 1
"""Groups of each step beyond those that train: what of them has not ended by then is cancelled."""

RECEIVE_S = 0.02
"""Between two outcomes, at most."""

CHECKPOINT_EVERY = 2
"""Steps. A kill undoes those since the last checkpoint."""

MARK = re.compile(r"\[(\S+) (\S+) turn (\d+)\]")
"""What a worker writes into its prompts: its name, the episode, the turn."""


class FakeSampler:
    """Answers with a fresh nonce, after a random delay."""

    def __init__(self, oracle: Lines, rng: random.Random, *, delay_s: float) -> None:
        self._oracle = oracle
        self._rng = rng
        self._delay_s = delay_s
        self._version = -1
        self._published = asyncio.Event()

        self._tokenizer = LightTokenizer(TINY_MODEL)
        self._stop = self._tokenizer.convert_tokens_to_ids("<|im_end|>")

    @property
    def version(self) -> int:
        """The policy version that samples."""
        return self._version

    def publish(self, version: int) -> None:
        self._version = version
        self._published.set()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        await self._published.wait()
        version, nonce = self.version, secrets.token_hex(6)
        # Some spellings that the tokenizer itself would never choose: one token a character.
        spelled = [self._tokenizer.encode(char)[0] for char in nonce]
        ids = [*(self._tokenizer.encode(nonce) if self._rng.random() < 0.5 else spelled), self._stop]
        prompt = self._tokenizer.decode(unpack_ids(request.prompt).tolist())
        worker, episode, turn = MARK.findall(prompt)[-1]
        sample = secrets.token_hex(8)
        self._oracle.write(event="begin", sample=sample, worker=worker, episode=episode, turn=int(turn))
        try:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._delay_s)
        except asyncio.CancelledError:
            self._oracle.write(event="cancelled", sample=sample)
            raise
        logprobs = [-self._rng.random() for _ in ids]
        self._oracle.write(
            event="end",
            sample=sample,
            nonce=nonce,
            prompt=request.prompt.hex(),
            sampled=pack_ids(ids).hex(),
            logprobs=pack_logprobs(logprobs).hex(),
        )
        sequence = SampledSequence(
            sampled=pack_ids(ids), logprobs=pack_logprobs(logprobs), stop_reason="stop"
        )
        return SampleResult(sequences=[sequence], policy_version=version, logprob_kind="processed")


def received(outcome: Outcome) -> dict[str, object]:
    """An outcome as a line of the log."""
    line: dict[str, object] = {
        "event": "received",
        "episode": outcome.episode_uuid,
        "pool": outcome.pool,
        "number": outcome.number,
    }
    if not isinstance(outcome, EpisodeAccepted):
        return line | {"kind": "failed"}
    return line | {
        "kind": "ended",
        "attempt": outcome.attempt,
        "client": outcome.client_uuid,
        "reward": outcome.reward,
        "metadata": outcome.metadata,
        "calls": [call.call_id for call in outcome.calls],
    }


def whole_checkpoints(known: Iterable[dict[str, Any]]) -> list[int]:
    """The steps whose checkpoints earlier processes have left; a resumption removes the later ones."""
    steps = list[int]()
    for line in known:
        if line["event"] == "resumed":
            steps = [each for each in steps if each <= line["step"]]
        elif line["event"] == "checkpoint":
            steps.append(line["step"])
    return steps


class Trainer:
    """One process of it."""

    def __init__(
        self, link: TrainerLink, sampler: FakeSampler, log: Lines, options: argparse.Namespace
    ) -> None:
        self._link = link
        self._sampler = sampler
        self._log = log
        self._groups: int = options.groups
        self._steps: int = options.steps
        self._pause_s: float = options.pause_s
        self._rng = random.Random(secrets.randbits(32))
        self._resumption = 0
        self._planned: dict[int, dict[str, list[str]]] = defaultdict(dict)
        """Step -> group -> its episodes."""

        self._waiting: set[str] = set()
        """Those of steps that are not over."""

        self._step_of: dict[str, int] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._news = asyncio.Event()

    async def run(self, checkpoints: Sequence[int]) -> None:
        history = await self._link.resume(checkpoints)
        self._resumption = history.resumption
        self._log.write(event="resumed", resumption=history.resumption, step=history.step)
        await self._publish(history.newest_version + 1, history.step)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._watch_for_stop())
            await self._train(history)

    async def _train(self, history: History) -> None:
        for each in history.planned:
            self._planned[history.step + 1].setdefault(each.group_id, []).append(each.episode_uuid)
            self._waiting.add(each.episode_uuid)
            self._step_of[each.episode_uuid] = history.step + 1
        await self._plan(history.step + 1, self._groups + EXTRA_GROUPS - history.planned_groups)
        for step in range(history.step + 1, self._steps + 1):
            await self._plan(step + 1, self._groups + EXTRA_GROUPS)
            await self._step(step)
            if step % CHECKPOINT_EVERY == 0 or step == self._steps:
                self._log.write(event="checkpoint", step=step)
                version = self._sampler.version
                saved = CheckpointRow(step=step, time=time.time(), policy_version=version, train_seconds=0.0)
                await self._commit([saved])
        self._log.write(event="finished", resumption=self._resumption)

    async def _plan(self, step: int, groups: int) -> None:
        """Register the episodes of a step, while the step before it collects its own."""
        if step > self._steps or groups <= 0:
            return
        planned = self._planned[step]
        for group in range(groups):
            first = len(planned) * GROUP_SIZE
            names = [f"e{step}-{self._resumption}-{first + number}" for number in range(GROUP_SIZE)]
            planned[f"g{step}-{self._resumption}-{group}"] = names
        names = [name for group in list(planned.values())[-groups:] for name in group]
        self._waiting.update(names)
        self._step_of.update(dict.fromkeys(names, step))
        self._log.write(event="plans", episodes=names, step=step)
        await self._link.register(
            [
                NewEpisode(
                    episode_uuid=name,
                    episode_type="train",
                    group_id=group,
                    group_size=GROUP_SIZE,
                    payload=json.dumps({"name": name}).encode(),
                    step=step,
                    position=number,
                )
                for number, (group, members) in enumerate(list(planned.items())[-groups:])
                for name in members
            ]
        )
        self._log.write(event="registered", episodes=names, step=step)

    async def _step(self, step: int) -> None:
        """Wait until enough groups are complete, cancel the rest, and train."""
        planned = self._planned.pop(step)
        while len(complete := self._complete(planned)) < min(self._groups, len(planned)):
            self._news.clear()
            await self._news.wait()
        trains = complete[: self._groups]
        others = [name for group in planned if group not in trains for name in planned[group]]
        self._waiting.difference_update(name for names in planned.values() for name in names)
        if running := [name for name in others if name not in self._outcomes]:
            self._log.write(event="cancels", episodes=running)
            self._link.cancel(running, "the step has enough without it")
        rows = [
            TrainedRow(episode=self._outcomes.pop(name).sequence, step=step, outcome=Use.TRAINED, place=place)
            for place, group in enumerate(trains)
            for name in planned[group]
        ]
        rows += [
            TrainedRow(episode=outcome.sequence, step=step, outcome=Use.LEFT_OUT, reason="not needed")
            for name in others
            if (outcome := self._outcomes.pop(name, None)) is not None
        ]
        used = [name for group in trains for name in planned[group]]
        about = {"step": step, "episodes": used, "resumption": self._resumption}
        self._log.write(event="commits", **about)
        await self._publish(self._sampler.version + 1, step, StepRow, rows)
        self._log.write(event="committed", **about)

    def _complete(self, planned: dict[str, list[str]]) -> list[str]:
        return [group for group, names in planned.items() if all(name in self._outcomes for name in names)]

    async def _publish(
        self, version: int, step: int, kind: type[StepRow] | None = None, rows: Sequence[TrainedRow] = ()
    ) -> None:
        """A policy version, with the step that made it."""
        now = time.time()
        trained = [kind(step=step, time=now, policy_version=version)] if kind else []
        await self._commit([PublicationRow(policy_version=version, step=step, time=now), *trained, *rows])
        self._sampler.publish(version)
        self._link.set_status(policy_version=version, global_step=step)

    async def _commit(self, rows: Sequence[PublicationRow | StepRow | TrainedRow | CheckpointRow]) -> None:
        self._link.note(rows)
        await asyncio.sleep(self._rng.uniform(0, self._pause_s))
        await self._link.commit()

    async def _receive(self) -> None:
        """Those that no step waits for are left out at once: cancelled ones, and clients' own."""
        while True:
            for outcome in await self._link.outcomes():
                self._log.write(**received(outcome), resumption=self._resumption)
                if outcome.episode_uuid in self._waiting:
                    self._outcomes[outcome.episode_uuid] = outcome
                    self._news.set()
                else:
                    step = self._step_of.get(outcome.episode_uuid, 0)
                    self._link.note([TrainedRow(episode=outcome.sequence, step=step, outcome=Use.LEFT_OUT)])
                await asyncio.sleep(self._rng.uniform(0, RECEIVE_S))

    async def _watch_for_stop(self) -> None:
        await self._link.stop_requested.wait()
        self._log.write(event="stopped")


async def train(options: argparse.Namespace) -> None:
    known = read_lines(options.run_dir / TRAINER)
    rng = random.Random(secrets.randbits(32))
    sampler = FakeSampler(Lines(options.run_dir / ORACLE), rng, delay_s=options.delay_s)
    link = TrainerLink(options.link, trainer_id=uuid4().hex, model="fake", sampler=sampler.sample)
    async with link:
        await Trainer(link, sampler, Lines(options.run_dir / TRAINER), options).run(whole_checkpoints(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True, help="that train in each step")
    parser.add_argument("--delay-s", type=float, default=0.05, help="of a sample, on average")
    parser.add_argument("--pause-s", type=float, default=0.5, help="between a commit and its wait, at most")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(train(options))


if __name__ == "__main__":
    main()
