"""`run_training`: one run from a config, in either mode, with everything it opens closed again."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkerscript.config import EvaluationConfig, RunConfig, model_folder
from tinkerscript.dashboard.learning_curve import draw_learning_curve
from tinkerscript.dashboard.watcher import ProgressReporter
from tinkerscript.errors import AlignmentError, ConfigError, LinkError
from tinkerscript.processes.children import (
    ServerAddress,
    former_server_gone,
    release_former_workers,
    results_accepted,
    server_address,
    server_child,
    worker_child,
)
from tinkerscript.processes.supervisor import Supervisor, run_beside
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.alignment.diagnosis import Finding
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.server.addresses import read_server_info
from tinkerscript.train.engines import opened_engine
from tinkerscript.train.grpo import GRPO
from tinkerscript.train.history import History
from tinkerscript.train.journal import Journal, lost_episodes
from tinkerscript.train.learner import Learner
from tinkerscript.train.network_source import NetworkSource
from tinkerscript.train.policy import Policy
from tinkerscript.train.run_folder import ALIGNMENT_FILE, FINAL_CHECKPOINT, RunFolder, history_of
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.source import EpisodeSource
from tinkerscript.train.trained_model import trained_model
from tinkerscript.trainer_link.trainer_end import TrainerLink

GOODBYE_S = 2.0

logger = logging.getLogger(__name__)


async def run_training(
    config: RunConfig, watcher: ProgressReporter, *, path: Path | None = None, join: bool = False
) -> RunFolder:
    """Train as `config` says; returns the run's folder, whose summary.json has the figures.

    `path`: the folder of a run to go on with. `join`: with the server that serves `path` already, instead
    of one of its own. Raises ConfigError for what cannot start; ends its child processes however it ends.
    """
    samples = _samples(config)
    watcher.begin(config.training.steps)
    if samples and (warning := not_held_out(samples, config.evaluation)):
        watcher.note(warning)
    folder = RunFolder(config, now=datetime.now(), path=path)
    history = history_of(folder)
    durable = config.interchange_server.durability == "full"
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        journal = stack.enter_context(Journal(folder.path / "journal.jsonl", durable=durable))
        opening = opened_engine(
            config.engine,
            checkpoint_dir=folder.checkpoints,
            seed=config.seed,
            restore=folder.checkpoint_name(history.step) if history.checkpoint else None,
            watcher=watcher,
        )
        engine = await stack.enter_async_context(opening)
        _restore(history, folder, samples)
        version_file = folder.path / "policy_version"
        policy = Policy(engine.client, version_file, seed=config.seed, max_context=engine.max_context)
        report = AlignmentReport.from_json(history.checkpoint.report if history.checkpoint else {})
        model = trained_model(model_folder(config.engine.model), engine)
        learner = Learner(
            engine.client,
            config.training,
            model=model,
            report=report,
            seed=config.seed,
            start_logprobs=engine.start_logprobs,
        )
        async with _opened(config, folder.path, policy, watcher, join=join) as opened:
            source = opened.source
            grpo = GRPO(config, folder, samples, source, policy, learner, journal, report, watcher, history)
            grpo.train_seconds = history.checkpoint.train_seconds if history.checkpoint else 0.0
            with _kept(report, grpo):
                await run_beside(opened, asyncio.create_task(grpo.run(), name="grpo"))
            await engine.client.save_state(FINAL_CHECKPOINT)
            audit = await _audit(journal, opened)
        _write_results(folder, grpo, audit)
    return folder


@contextmanager
def _kept(report: AlignmentReport, grpo: GRPO) -> Generator[None]:
    """Write the alignment report however the run ends, what ended it included."""
    try:
        yield
    except AlignmentError as error:
        if not report.findings or report.findings[-1]["name"] != error.name:
            report.add_finding(Finding(error.name, str(error)), step=grpo.step + 1)
        raise
    finally:
        grpo.folder.write_json(ALIGNMENT_FILE, report.as_json())


def _samples(config: RunConfig) -> TaskSamples | None:
    """The task's samples; None where clients register their own. Raises ConfigError."""
    if config.all_tasks or not config.enable_tinkerscript_mode:
        return TaskSamples(config.all_tasks, seed=config.seed)
    if config.evaluation.episodes or config.workers.count:
        raise ConfigError(
            "without task.name the episodes are samples that clients register: set evaluation.episodes and "
            "workers.count to 0, or name a task"
        )
    return None


def not_held_out(samples: TaskSamples, evaluation: EvaluationConfig) -> str:
    """What to say of evaluation samples that train as well; empty where there are none."""
    interim = evaluation.interim_episodes if evaluation.every_steps else 0
    shared, number = samples.trained_too(max(evaluation.episodes, interim))
    if not shared:
        return ""
    return (
        f"{shared} of {number} evaluation samples are trained on too: the score is not held out; "
        "give task.eval_args another split"
    )


def _restore(history: History, folder: RunFolder, samples: TaskSamples | None) -> None:
    """The order of samples and the metrics as they were after the checkpoint's step."""
    if not folder.holds_a_run:
        return
    if samples:
        samples.next_position = history.next_position
    folder.forget_metrics_after(history.step)


@dataclass(frozen=True, slots=True)
class Opened:
    """What runs the episodes of this run."""

    source: EpisodeSource
    supervisor: Supervisor
    server_url: str | None = None
    """None without a server."""

    link: TrainerLink | None = None
    policy: Policy | None = None
    """What samples for others; None where it samples in this process alone."""

    async def failed(self) -> None:
        """Returns never; raises when a child cannot run, the sampler is broken, or the engine is to stop."""
        reasons = [self.supervisor.failed(), self._stop_requested()]
        if self.policy is not None:
            reasons.append(self.policy.failed())
        tasks = [asyncio.ensure_future(reason) for reason in reasons]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_requested(self) -> None:
        if self.link is None:
            await asyncio.Event().wait()
        else:
            await self.link.stop_requested.wait()
            raise asyncio.CancelledError("the engine was asked to stop")


@dataclass(frozen=True, slots=True)
class Audit:
    """The trainer's journal held against the server's own records."""

    lost: list[str]
    restarts: int
    server_results_accepted: int | None
    """None without a server."""


@asynccontextmanager
async def _opened(
    config: RunConfig, path: Path, policy: Policy, watcher: ProgressReporter, *, join: bool
) -> AsyncGenerator[Opened]:
    opening = _network(config, path, policy, watcher, join=join)
    if not config.enable_tinkerscript_mode:
        opening = _in_process(config, policy, watcher)
    async with opening as opened:
        yield opened


@asynccontextmanager
async def _in_process(config: RunConfig, policy: Policy, watcher: ProgressReporter) -> AsyncGenerator[Opened]:
    # Renderers and rollout loops, of which a run with a server needs nothing, take seconds to import.
    module = importlib.import_module("tinkerscript.train.in_process_source")
    async with (
        Supervisor(max_restarts=0, note=watcher.note) as supervisor,
        module.InProcessSource(config, policy) as source,
    ):
        yield Opened(source, supervisor)


@asynccontextmanager
async def _network(
    config: RunConfig, path: Path, policy: Policy, watcher: ProgressReporter, *, join: bool
) -> AsyncGenerator[Opened]:
    async with Supervisor(max_restarts=config.workers.max_restarts, note=watcher.note) as supervisor:
        address = await _server(path, supervisor, join=join)
        watcher.note(f"interchange server at {address.url}, run folder {path}")
        link = TrainerLink(
            address.link_address,
            trainer_id=uuid4().hex,
            model=config.engine.model,
            sampler=policy.sample,
            engine_status="ENGINE.BOOTING",
            keys=address.trainer_keys(),
        )
        async with link:
            release_former_workers(path, link)
            for number in range(config.workers.count):
                await supervisor.start(worker_child(config, path, address.url, number, link))
            source = NetworkSource(link, group_size=config.training.group_size)
            try:
                yield Opened(source, supervisor, address.url, link, policy)
            finally:
                await _say_goodbye(link)


async def _say_goodbye(link: TrainerLink) -> None:
    """Let the server know at once, if it is there, rather than by this trainer's silence."""
    link.set_status(engine_status="ENGINE.OFFLINE")
    try:
        async with asyncio.timeout(GOODBYE_S):
            await link.flush()
    except (LinkError, TimeoutError) as error:
        logger.info("link.no_goodbye error=%s", error)


async def _server(path: Path, supervisor: Supervisor, *, join: bool) -> ServerAddress:
    """The address of the server to work with: one that is there, or a child of this process."""
    if join:
        info = read_server_info(path)
        if info is None:
            raise LinkError(f"no server serves {path}: start one with `tinkerscript serve --resume {path}`")
        keys = Path(info.link_keys) if info.link_keys else None
        return ServerAddress(info.url, info.link_address, keys)
    await former_server_gone(path)
    server = server_child(path)
    await supervisor.start(server)
    return await server_address(path, server, supervisor)


async def _audit(journal: Journal, opened: Opened) -> Audit:
    """Episodes lost by the trainer's journal against the server's store, and the server's own count."""
    restarts = opened.supervisor.restarts
    if opened.server_url is None or opened.link is None:
        return Audit(lost_episodes(journal, None), restarts, None)
    await opened.source.flush()
    recorded = await opened.link.recorded_outcomes(list(journal.registered))
    lost = lost_episodes(journal, {uuid: outcome.state for uuid, outcome in recorded.items()})
    return Audit(lost, restarts, await results_accepted(opened.server_url))


def _write_results(folder: RunFolder, grpo: GRPO, audit: Audit) -> None:
    folder.write_json("summary.json", summarise(grpo, audit))
    draw_learning_curve(folder.path / "metrics.jsonl", folder.path / "learning_curve.png")
    folder.publish_as_latest()


def summarise(grpo: GRPO, audit: Audit) -> dict[str, Any]:
    """The figures of summary.json."""
    before, after = grpo.evaluations.get("before"), grpo.evaluations.get("after")
    journal, report = grpo.journal, grpo.report
    train_episodes = journal.count("train", "accepted")
    return {
        "eval_before": before.score if before else None,
        "eval_after": after.score if after else None,
        "eval_episodes": after.accepted if after else 0,
        "eval_failed": sum(evaluation.failed for evaluation in grpo.evaluations.values()),
        "train_episodes": train_episodes,
        "episodes_accepted": journal.count("train", "accepted") + journal.count("eval", "accepted"),
        "episodes_failed": sum(o == "failed" for o in journal.outcomes.values()) - journal.cancelled,
        "episodes_cancelled": journal.cancelled,
        "episodes_retried": journal.retries,
        "episodes_discarded": journal.discarded,
        "episodes_lost": len(audit.lost),
        "processes_restarted": audit.restarts,
        "server_results_accepted": audit.server_results_accepted,
        "tokens_trained": report.tokens_trained,
        "episodes_per_s": train_episodes / grpo.train_seconds if grpo.train_seconds else 0.0,
        "train_seconds": grpo.train_seconds,
        "max_abs_dlogp": report.max_abs_dlogp,
        "mean_abs_dlogp": report.whole.at_lag_0.mean_abs,
        "sequences_per_episode": report.sequences_per_episode,
        "alignment": explain(report),
        "policy_version": grpo.policy.version,
        "steps": grpo.step,
        "seed": grpo.config.seed,
    }
