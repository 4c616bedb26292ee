"""`run_training`: one run from a config, in either mode, with everything it opens closed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinker_cookbook.renderers import get_renderer
from transformers import AutoTokenizer

from tinkerscript.config import RunConfig, model_folder
from tinkerscript.dashboard.report import draw_learning_curve
from tinkerscript.dashboard.watcher import Watcher
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.server.sqlite_store import read_outcomes
from tinkerscript.server.trainer_link import TrainerLink
from tinkerscript.train.grpo import GRPO
from tinkerscript.train.in_process_source import InProcessSource
from tinkerscript.train.journal import Journal, lost_episodes
from tinkerscript.train.learner import Learner
from tinkerscript.train.network_source import NetworkSource
from tinkerscript.train.policy import Policy
from tinkerscript.train.processes import results_accepted, server_address, server_child, worker_child
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.source import EpisodeSource
from tinkerscript.train.supervisor import Supervisor, run_beside

FINAL_CHECKPOINT = "final"


async def run_training(config: RunConfig, watcher: Watcher, *, folder: RunFolder | None = None) -> RunFolder:
    """Train as `config` says; returns the run's folder, whose summary.json has the figures.

    Raises ConfigError for what cannot start, and ends its child processes however it ends.
    """
    samples = TaskSamples(config.task, seed=config.seed)
    folder = folder or RunFolder(config, now=datetime.now())
    engine = EmbeddedEngine(
        model_folder(config.engine.model),
        checkpoint_dir=folder.path / "checkpoints",
        seed=config.seed,
        threads=config.engine.threads,
        max_batch=config.engine.max_batch,
        device=config.engine.device,
    )
    try:
        with engine, Journal(folder.path / "journal.jsonl") as journal:
            client = engine.create_training_client()
            policy = Policy(client, folder.path / "policy_version")
            report = AlignmentReport()
            learner = Learner(
                client, config.training, vocabulary=engine.vocabulary, report=report, seed=config.seed
            )
            open_source = _network if config.enable_tinkerscript_mode else _in_process
            async with open_source(config, folder.path, policy, watcher) as opened:
                grpo = GRPO(config, folder, samples, opened.source, policy, learner, journal, report, watcher)
                await run_beside(opened.supervisor, asyncio.create_task(grpo.run(), name="grpo"))
                await client.save_state(FINAL_CHECKPOINT)
                audit = await _audit(journal, folder.path, opened)
            _write_results(folder, grpo, audit)
    finally:
        folder.close()
    return folder


@dataclass(frozen=True, slots=True)
class Opened:
    """What runs the episodes of this run."""

    source: EpisodeSource
    supervisor: Supervisor
    server_url: str | None = None
    """None without a server."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The trainer's journal held against the server's own records."""

    lost: list[str]
    restarts: int
    server_results_accepted: int | None
    """None without a server."""


@asynccontextmanager
async def _in_process(
    config: RunConfig, path: Path, policy: Policy, watcher: Watcher
) -> AsyncGenerator[Opened]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.engine.model), local_files_only=True)
    renderer = get_renderer("qwen3_instruct", tokenizer)
    async with (
        Supervisor(max_restarts=0, note=watcher.note) as supervisor,
        InProcessSource(config, policy, renderer) as source,
    ):
        yield Opened(source, supervisor)


@asynccontextmanager
async def _network(config: RunConfig, path: Path, policy: Policy, watcher: Watcher) -> AsyncGenerator[Opened]:
    async with Supervisor(max_restarts=config.workers.max_restarts, note=watcher.note) as supervisor:
        server = server_child(path)
        await supervisor.start(server)
        address = await server_address(path, server, supervisor)
        watcher.note(f"interchange server at {address.url}, run folder {path}")
        link = TrainerLink(
            address.link_address, trainer_id=uuid4().hex, model=config.engine.model, sampler=policy.sample
        )
        async with link:
            for number in range(config.workers.count):
                await supervisor.start(worker_child(config, path, address.url, number, link))
            yield Opened(NetworkSource(link), supervisor, address.url)


async def _audit(journal: Journal, folder: Path, opened: Opened) -> Audit:
    """Episodes lost by the trainer's journal against the server's file, and the server's own count."""
    restarts = opened.supervisor.restarts
    if opened.server_url is None:
        return Audit(lost_episodes(journal, None), restarts, None)
    await opened.source.flush()
    lost = lost_episodes(journal, read_outcomes(folder / "server.sqlite"))
    return Audit(lost, restarts, await results_accepted(opened.server_url))


def _write_results(folder: RunFolder, grpo: GRPO, audit: Audit) -> None:
    folder.write_json("alignment.json", grpo.report.as_json())
    folder.write_json("summary.json", summarise(grpo, audit))
    draw_learning_curve(folder.path / "metrics.jsonl", folder.path / "learning_curve.png")
    folder.publish_as_latest()


def summarise(grpo: GRPO, audit: Audit) -> dict[str, Any]:
    """The figures of summary.json."""
    scores = {evaluation.label: evaluation for evaluation in grpo.evaluations}
    before, after = scores.get("before"), scores.get("after")
    journal, report = grpo.journal, grpo.report
    train_episodes = journal.count("train", "accepted")
    return {
        "eval_before": before.score if before else None,
        "eval_after": after.score if after else None,
        "eval_episodes": after.accepted if after else 0,
        "eval_failed": sum(evaluation.failed for evaluation in grpo.evaluations),
        "train_episodes": train_episodes,
        "episodes_accepted": journal.count("train", "accepted") + journal.count("eval", "accepted"),
        "episodes_failed": journal.count("train", "failed") + journal.count("eval", "failed"),
        "episodes_retried": journal.retries,
        "episodes_lost": len(audit.lost),
        "processes_restarted": audit.restarts,
        "server_results_accepted": audit.server_results_accepted,
        "tokens_trained": report.tokens_trained,
        "episodes_per_s": train_episodes / grpo.train_seconds if grpo.train_seconds else 0.0,
        "train_seconds": grpo.train_seconds,
        "max_abs_dlogp": report.max_abs_dlogp,
        "sequences_per_episode": report.sequences_per_episode,
        "policy_version": grpo.policy.version,
        "seed": grpo.config.seed,
    }
