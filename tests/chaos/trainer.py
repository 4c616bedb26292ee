"""A trainer whose sampler is a fake: plans episodes for steps, answers samples, and commits each step into
the ledger.

    python tests/chaos/trainer.py --run-dir DIR --link ADDRESS --steps N --groups N --max-policy-lag L

The product's own `GroupStream` and `Policy` decide which groups start and train, and each publication cuts
what is being sampled, which goes on with the next version (`on_publish: continue`).

May be killed anywhere and started again: it resumes, as a trainer does, from the newest of its checkpoints,
each of which is a line of its log. Its log of samples is the oracle: for each a nonce that no other sample
has, and the exact ids that spell it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from evidence import ORACLE, TRAINER, Lines, read_lines

from tinkerscript.config import TrainingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.ledger.history import History
from tinkerscript.ledger.rows import CheckpointRow, StepRow, TrainedRow, Use
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    SampleFunction,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.backends.backend import Publisher
from tinkerscript.train.collector import Collector
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.policy import Policy
from tinkerscript.train.stream import GroupStream
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink

GROUP_SIZE = 8
CHECKPOINT_EVERY = 2
"""Steps. A kill undoes those since the last checkpoint."""

SAMPLE_S = 0.05
"""That a sample takes, on average."""

COMMIT_S = 0.5
"""Between a commit and the wait for it, at most."""

NONCE_CHARS = 12

MARK = re.compile(r"\[(\S+) (\S+) turn (\d+)\]")
"""What a worker writes into its prompts: its name, the episode, the turn."""


class Spelling:
    """Nonces in the ids of the tiny model."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.tokenizer = LightTokenizer(TINY_MODEL)
        self._stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def rest(self, begun: Sequence[int]) -> list[int]:
        """The ids after those of a reply that has begun: the rest of a nonce, and the end of the turn."""
        said = self.tokenizer.decode(list(begun))
        rest = secrets.token_hex(NONCE_CHARS // 2)[len(said) :]
        # Some spellings that the tokenizer itself would never choose: one token a character.
        spelled = [self.tokenizer.encode(char)[0] for char in rest]
        chosen = self.tokenizer.encode(rest) if rest and self._rng.random() < 0.5 else spelled
        return [*chosen, self._stop]


class Witness:
    """Writes the oracle's log of the calls that `sample` answers."""

    def __init__(self, oracle: Lines, spelling: Spelling, sample: SampleFunction) -> None:
        self._oracle, self._spelling, self._sample = oracle, spelling, sample

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        prompt = self._spelling.tokenizer.decode(unpack_ids(request.prompt).tolist())
        worker, episode, turn = MARK.findall(prompt)[-1]
        sample = secrets.token_hex(8)
        self._oracle.write(event="begin", sample=sample, worker=worker, episode=episode, turn=int(turn))
        try:
            result = await self._sample(request, progress)
        except (asyncio.CancelledError, GatewayError):
            self._oracle.write(event="cancelled", sample=sample)
            raise
        (sequence,) = result.sequences
        self._oracle.write(
            event="end",
            sample=sample,
            nonce=self._spelling.tokenizer.decode(unpack_ids(sequence.sampled).tolist()[:-1]),
            prompt=request.prompt.hex(),
            sampled=sequence.sampled.hex(),
            logprobs=sequence.logprobs.hex(),
        )
        return result


class CutSampler(Sampler):
    """One version of the weights: token by token, until it is cut. The oracle has what each has sampled."""

    def __init__(self, version: int, oracle: Lines, spelling: Spelling, rng: random.Random) -> None:
        self._version, self._oracle, self._spelling, self._rng = version, oracle, spelling, rng
        self._is_cut = asyncio.Event()

    def cut(self) -> None:
        self._is_cut.set()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        before = unpack_ids(request.prompt)[len(request.prompt) // 4 - request.sampled :].tolist()
        wanted, ids = self._spelling.rest(before), list[int]()
        pause_s = self._rng.uniform(0.2, 1.8) * SAMPLE_S / len(wanted)
        for token in wanted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_cut.wait(), pause_s)
            if self._is_cut.is_set():
                break
            ids.append(token)
        sequence = SampledSequence(
            sampled=pack_ids(ids),
            logprobs=pack_logprobs([-self._rng.random() for _ in ids]),
            stop_reason="stop",
            is_cut=len(ids) < len(wanted),
        )
        self._oracle.write(
            event="part",
            version=self._version,
            prompt=request.prompt.hex(),
            sampled=sequence.sampled.hex(),
            logprobs=sequence.logprobs.hex(),
        )
        return SampleResult(sequences=[sequence], policy_version=self._version, logprob_kind="processed")


@dataclass
class CutPublisher(Publisher):
    """Publishes versions that differ in nothing but their number."""

    made: Callable[[int], CutSampler]
    max_context = 1_000_000
    seeds = False

    async def publish(self, policy_version: int) -> Sampler:
        return self.made(policy_version)


def received(outcome: Outcome) -> dict[str, object]:
    """An outcome as a line of the log."""
    line: dict[str, object] = {"event": "received", "episode": outcome.episode_uuid}
    line |= {"pool": outcome.pool, "number": outcome.number}
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


class LoggedSource(EpisodeSource):
    """Writes down what the trainer plans, cancels and receives."""

    def __init__(self, link: TrainerLink, log: Lines) -> None:
        super().__init__(link, group_size=GROUP_SIZE, client_samples=False)
        self._log = log
        self.resumption = 0

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        about = {"episodes": [each.episode_uuid for each in episodes], "step": step}
        self._log.write(event="plans", **about)
        await super().start(episodes, step=step)
        self._log.write(event="registered", **about)

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        if episode_uuids:
            self._log.write(event="cancels", episodes=list(episode_uuids))
        super().cancel(episode_uuids, reason)

    async def outcomes(self) -> list[Outcome]:
        outcomes = await super().outcomes()
        for outcome in outcomes:
            self._log.write(**received(outcome), resumption=self.resumption)
        return outcomes


class Positions:
    """In place of a task's samples: their numbers."""

    curriculum = None

    def __init__(self, history: History) -> None:
        self._next, self._again = history.next_position, list(history.again)
        self._resumption, self._named = history.resumption, 0

    def train_groups(self, *, step: int, groups: int, group_size: int) -> list[list[PlannedEpisode]]:
        positions, self._again = self._again[:groups], self._again[groups:]
        new = groups - len(positions)
        positions += range(self._next, self._next + new)
        self._next += new
        return [
            [
                self.planned_again(f"g{step}-{position}", position, episode_uuid=self._name(step))
                for _ in range(group_size)
            ]
            for position in positions
        ]

    def _name(self, step: int) -> str:
        """Hostile clients guess that there is an `e1-1-0`."""
        self._named += 1
        return f"e{step}-{self._resumption}-{self._named - 1}"

    def planned_again(self, group_id: str, position: int, **more: str) -> PlannedEpisode:
        return PlannedEpisode("train", group_id, {"position": position}, position=position, **more)


class Trainer:
    """One process of a trainer whose groups start beside its steps, and whose weights move in flight."""

    def __init__(
        self, link: TrainerLink, publisher: CutPublisher, log: Lines, options: argparse.Namespace
    ) -> None:
        self._link, self._publisher, self._log = link, publisher, log
        self._lag: int = options.max_policy_lag
        self._rng = random.Random(secrets.randbits(32))
        self._config = TrainingConfig(
            steps=options.steps,
            groups_per_step=options.groups,
            group_size=GROUP_SIZE,
            max_policy_lag=self._lag,
        )
        self.policy: Policy | None = None

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        if self.policy is None:
            raise GatewayError(503, "engine_unavailable", "the trainer is starting; retry")
        return await self.policy.sample(request, progress)

    async def run(self, checkpoints: Sequence[int]) -> None:
        history = await self._link.resume(checkpoints, plan_lag=self._lag)
        self._log.write(event="resumed", resumption=history.resumption, step=history.step)
        self._source = LoggedSource(self._link, self._log)
        self._source.resumption = history.resumption
        self._lags = PolicyLags(self._config, history.versions, max_lag=self._lag)
        self.policy = Policy(self._publisher, self._link, version=history.newest_version, in_flight=True)
        shown = QuietReporter()
        collector = Collector(self._source, shown, GROUP_SIZE, client_samples=False, seen=self.policy.note)
        samples: Any = Positions(history)
        self._stream = GroupStream(self._source, collector, shown, self._config, samples, self._lags)
        self._stream.restore(history)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run())
            tasks.create_task(watch_for_stop(self._link, self._log))
            await collector.received_until(history.open_until)
            await self._publish(history.step)
            for step in range(history.step + 1, self._config.steps + 1):
                await self._step(step, history.resumption)
            self._stream.end()
            self._log.write(event="finished", resumption=history.resumption)

    async def _step(self, step: int, resumption: int) -> None:
        assert self.policy is not None
        taken = await self._stream.take(step, version=self.policy.version)
        outcomes = taken.batch.outcomes
        trained = [uuid for uuid in outcomes if uuid not in taken.stale]
        about = {"step": step, "episodes": trained, "resumption": resumption}
        self._log.write(event="commits", **about)
        version = await self._publish(step)
        rows = [
            TrainedRow(
                episode=outcome.sequence,
                step=step,
                outcome=Use.STALE if uuid in taken.stale else Use.TRAINED,
                reason=taken.stale.get(uuid, ""),
            )
            for uuid, outcome in outcomes.items()
        ]
        now = time.time()
        self._link.note([StepRow(step=step, time=now, policy_version=version), *rows])
        await asyncio.sleep(self._rng.uniform(0, COMMIT_S))
        await self._link.commit()
        self._log.write(event="committed", **about)
        if step % CHECKPOINT_EVERY == 0 or step == self._config.steps:
            self._log.write(event="checkpoint", step=step)
            saved = CheckpointRow(step=step, time=now, policy_version=version, train_seconds=0.0)
            await self._link.commit([saved])

    async def _publish(self, step: int) -> int:
        assert self.policy is not None
        version = await self.policy.publish(step)
        self._lags.published(version, step=step)
        self._link.set_status(policy_version=version, global_step=step, engine_status="ENGINE.ROLLING")
        await self._stream.published(step)
        return version


async def watch_for_stop(link: TrainerLink, log: Lines) -> None:
    await link.stop_requested.wait()
    log.write(event="stopped")


async def train(options: argparse.Namespace) -> None:
    known = whole_checkpoints(read_lines(options.run_dir / TRAINER))
    rng = random.Random(secrets.randbits(32))
    oracle, log, spelling = Lines(options.run_dir / ORACLE), Lines(options.run_dir / TRAINER), Spelling(rng)
    publisher = CutPublisher(lambda version: CutSampler(version, oracle, spelling, rng))
    late: list[Trainer] = []
    witness = Witness(oracle, spelling, lambda request, progress=None: late[0].sample(request, progress))
    # As a run does: no episode is handed out before the first publication, which says its version.
    name, status = uuid4().hex, "ENGINE.BOOTING"
    async with TrainerLink(
        options.link, trainer_id=name, model="fake", sampler=witness.sample, engine_status=status
    ) as link:
        late.append(Trainer(link, publisher, log, options))
        await late[0].run(known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True, help="that train in each step")
    parser.add_argument("--max-policy-lag", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(train(options))


if __name__ == "__main__":
    main()
