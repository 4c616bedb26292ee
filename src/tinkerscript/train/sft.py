"""Supervised fine-tuning on chats or a run's best episodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tinker
from tinker_cookbook.supervised.common import compute_mean_nll

from tinkerscript.config import RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import ConfigError
from tinkerscript.ledger import Ledger, open_ledger
from tinkerscript.ledger.history import History, begin
from tinkerscript.ledger.rows import CheckpointRow, Row, StepRow
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.model_folder import model_folder
from tinkerscript.processes.supervisor import run_beside
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.train.backends import backend_named
from tinkerscript.train.backends.backend import (
    STEP_GRACE_S,
    TrainingClient,
    finish_despite_cancel,
    optimizer_step,
    skipped_note,
)
from tinkerscript.train.best_episodes import load_episodes
from tinkerscript.train.chats import (
    Chats,
    Datums,
    SupervisedExample,
    evenly_weighted,
    load_chats,
    trained_weight,
)
from tinkerscript.train.checkpoints import try_to_save
from tinkerscript.train.defaults import learning_rate, resolved
from tinkerscript.train.dpo import Dpo
from tinkerscript.train.open_run import OpenRun, begin_run, logged, open_page
from tinkerscript.train.run_folder import FINAL_CHECKPOINT, RunFolder
from tinkerscript.train.step_rows import chat_rows, keeps_tokens, metric_rows

HELD_OUT, ACCURACY = "held_out/nll", "held_out/accuracy"
ORIGIN_FILE = "sft_data.json"


async def run_sft(
    config: RunConfig,
    progress: ProgressReporter,
    *,
    path: Path | None = None,
    on_page: Callable[[str], object] | None = None,
) -> RunFolder:
    """See `run.run_training`."""
    model = model_folder(config.engine.model)
    backend_named(config.engine.backend).check(config.engine, model, progress.note)
    config, about_rates = resolved(config, model)
    chats = load_data(config, model)
    folder = RunFolder(config, model, now=datetime.now(), path=path)
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        stack.enter_context(logged(config, folder))
        check_origin(folder, chats)
        progress = await stack.enter_async_context(open_page(config, folder, progress, on_page))
        ledger = open_ledger("sqlite", folder.path, config.interchange_server.durability)
        stack.push_async_callback(ledger.close)
        history, next_chat = await _past(ledger, folder)
        run = begin_run(config, folder, progress, ledger=ledger, history=history)
        stack.push_async_exit(progress.exited)
        step = history.step
        progress.begin(chats.steps, done=step)
        for line in (
            f"{len(chats.train)} {chats.what} train for {chats.steps} steps, {len(chats.held_out)} are held "
            f"out, {chats.left_out} {chats.why_left_out} and are left out",
            *about_rates,
        ):
            progress.note(line)
        backend = await stack.enter_async_context(run.backend(model))
        await backend.check_loss("cross_entropy", None)
        if chats.longest > backend.max_context:
            raise ConfigError(
                f"sft.max_tokens: the longest chat has {chats.longest} tokens and the engine takes "
                f"{backend.max_context}; set it to that or less"
            )
        beta = config.sft.dpo_beta
        dpo = Dpo(backend.start_logprobs, beta) if beta else None
        folder.keep_config()
        sft = SupervisedRun(run, ledger, backend.client, chats, step, run.train_seconds, next_chat, dpo)
        await run_beside(backend, asyncio.create_task(sft.run(), name="sft"))
        with progress.waiting("the final checkpoint"):
            await sft.save(FINAL_CHECKPOINT)
        folder.write_json("summary.json", sft.summary())
        folder.draw_curve(at_once=True)
        await progress.end(None)  # Before the last copy of the ledger.
        await folder.finish_copies(progress)
    return folder


def load_data(config: RunConfig, model: Path) -> Chats:
    sft = config.sft
    if sft.data and Path(sft.data).expanduser().is_dir():
        return load_episodes(config, model)
    for name, is_set in (("dpo_beta", sft.dpo_beta > 0), ("best", sft.best > 1)):
        if is_set:
            raise ConfigError(
                f"sft.{name} compares the episodes of a group: sft.data has to be the folder of a run, got "
                f"{sft.data!r}"
            )
    return load_chats(config, model)


async def _past(ledger: Ledger, folder: RunFolder) -> tuple[History, int]:
    history = (await begin(ledger, folder.whole_checkpoints(), time=time.time())).history
    undo = "UPDATE {s}episodes SET undone = ? WHERE undone = 0 AND step > ?"
    ledger.execute(undo, history.resumption, history.step)
    await ledger.commit()
    ((last,),) = await ledger.read("SELECT coalesce(max(sequence), 0) FROM {s}episodes")
    return history, last + 1


def check_origin(folder: RunFolder, chats: Chats) -> None:
    """Refuse to resume with other chats."""
    path = folder.path / ORIGIN_FILE
    if path.exists():
        begun: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in chats.origin.items() if begun.get(name) != value]
        if changed:
            said = {"sha256": "the file of sft.data", "episodes": "the episodes of sft.data"}
            names = [said.get(name, name) for name in changed]
            raise ConfigError(
                f"{', '.join(names)} changed since the run in {folder.path} began, which would change its "
                "held-out chats; resume it with the original data and settings, or start a new run"
            )
        return
    folder.write_json(ORIGIN_FILE, chats.origin)


@dataclass
class SupervisedRun:
    parts: OpenRun
    ledger: Ledger
    client: TrainingClient
    chats: Chats
    step: int
    train_seconds: float
    next_chat: int
    dpo: Dpo | None = None
    # Weights and ledger may disagree, so a checkpoint would be wrong.
    _mid_step: bool = False

    def __post_init__(self) -> None:
        self._storage = StorageLimit(self.ledger, self.parts.config.recording_limit_mb)
        self._saved = self.step

    async def run(self) -> None:
        """Run or resume. Saves the last step unless the run ends within one."""
        every, saves = self.parts.config.evaluation.every_steps, self.parts.config.training.checkpoint_every
        self._began = time.monotonic() - self.train_seconds
        if self.step == 0:
            await self.measure()
        try:
            while self.step < self.chats.steps:
                await finish_despite_cancel(self.train_step(), within_s=STEP_GRACE_S)
                is_last = self.step == self.chats.steps
                if is_last or (every and self.step % every == 0):
                    await self.measure()
                if is_last or (saves and self.step % saves == 0):
                    await self._checkpoint()
        except (Exception, asyncio.CancelledError):
            if self.step > self._saved and not self._mid_step:
                await try_to_save(self._checkpoint(), self.step, self.parts.progress.note)
            raise

    async def train_step(self) -> None:
        began, step = time.monotonic(), self.step + 1
        examples = self.chats.batch(step)
        rate = learning_rate(self.parts.config.training, step, steps=self.chats.steps)
        with self.parts.progress.waiting(f"step {step} to train"):
            datums, measured = await self._weighted(examples)
            self._mid_step = True
            stepped = await optimizer_step(
                self.client, datums, self.parts.config.training, loss_fn="cross_entropy", learning_rate=rate
            )
        tokens = sum(datum.model_input.length for datum in datums)
        metrics = stepped.metrics
        metrics |= {
            "train/nll": metrics["train/loss"],  # A batch's weights sum to 1.
            "train/learning_rate": rate,
            "train/sequences": float(len(datums)),
            "train/tokens": float(tokens),
            "train/epoch": (step - 1) // self.chats.steps_per_epoch + 1.0,
            "tokens_per_s": tokens / (time.monotonic() - began),
            **{f"train/{name}": value for name, value in measured.items()},
        }
        number = len(datums)
        row = StepRow(step=step, time=time.time(), policy_version=step, accepted=number, trained=number)
        episodes = self._chat_rows(step, examples, datums, stepped.logprobs)
        await self.ledger.commit([row, *metric_rows(step, metrics), *episodes])
        self.step = step
        self.train_seconds = time.monotonic() - self._began
        self._mid_step = False
        await self._storage.keep()
        self.parts.folder.log_metrics(metrics, step=step)
        await asyncio.to_thread(self.parts.folder.draw_curve)
        self.parts.progress.step(step, metrics)
        if skipped := skipped_note(step, metrics):
            self.parts.progress.note(skipped)

    async def _weighted(self, examples: Sequence[SupervisedExample]) -> tuple[Datums, dict[str, float]]:
        if self.dpo is None:
            return evenly_weighted([datum for each in examples for datum in each.sequences]), {}
        return await self.dpo.weighted(examples, self.client)

    def _chat_rows(
        self,
        step: int,
        examples: Sequence[SupervisedExample],
        datums: Sequence[tinker.Datum],
        logprobs: Sequence[FloatArray],
    ) -> list[Row]:
        if not keeps_tokens(self.parts.config.recording, step) or len(logprobs) < len(datums):
            return []
        rows: list[Row] = []
        origins = [origin for each in examples for origin in each.origins]
        for datum, origin, row in zip(datums, origins, logprobs, strict=True):
            rows += chat_rows(self.next_chat, step, datum, row, origin)
            self.next_chat += 1
        return rows

    async def measure(self) -> None:
        """Held-out negative log-likelihood per trained token, in nats."""
        if not self.chats.held_out or self.step in dict(self.held_out_curve()):
            return
        with self.parts.progress.waiting("the held-out nll"):
            found = await self._held_out()
        metrics = {f"held_out/{name}": value for name, value in found.items()}
        self.parts.folder.log_metrics(metrics, step=self.step)
        self.ledger.note(metric_rows(self.step, metrics))
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self.parts.progress.note(f"held out after {self.step} steps: {said}")

    async def _held_out(self) -> dict[str, float]:
        if self.dpo is not None:
            _, found = await self.dpo.losses(self.chats.held_out, self.client)
            return found
        datums = [datum for each in self.chats.held_out for datum in each.sequences]
        return {"nll": await mean_nll(self.client, datums, batch_size=self.parts.config.sft.batch_size)}

    async def save(self, name: str) -> None:
        await self.client.save_state(name)
        await asyncio.to_thread(self.parts.folder.seal, name)

    async def _checkpoint(self) -> None:
        with self.parts.progress.waiting(f"the checkpoint of step {self.step}"):
            await self.save(self.parts.folder.checkpoint_name(self.step))
        done = CheckpointRow(
            step=self.step,
            time=time.time(),
            policy_version=self.step,
            train_seconds=self.train_seconds,
        )
        await self.ledger.commit([done])
        self._saved = self.step
        self.parts.folder.checkpointed()

    def held_out_curve(self, name: str = HELD_OUT) -> list[tuple[int, float]]:
        path = self.parts.folder.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [(entry["step"], entry[name]) for entry in entries if name in entry]

    def summary(self) -> dict[str, object]:
        curve = [nll for _, nll in self.held_out_curve()]
        accuracy = [share for _, share in self.held_out_curve(ACCURACY)]
        trained = sum(trained_weight(datum) for chat in self.chats.train for datum in chat.datums)
        return {
            "method": "sft",
            "nll_before": curve[0] if curve else None,
            "nll_after": curve[-1] if curve else None,
            **({"accuracy_before": accuracy[0], "accuracy_after": accuracy[-1]} if accuracy else {}),
            "steps": self.step,
            "epochs": self.chats.epochs,
            "chats_trained": len(self.chats.train),
            "chats_left_out": self.chats.left_out,
            "tokens_trained": int(trained) * self.chats.epochs,
            "train_seconds": self.train_seconds,
            "seed": self.parts.config.seed,
        }


async def mean_nll(client: TrainingClient, datums: Sequence[tinker.Datum], *, batch_size: int) -> float:
    pieces = [list(datums[i : i + batch_size]) for i in range(0, len(datums), batch_size)]
    outputs = [await client.forward(piece, "cross_entropy") for piece in pieces]
    logprobs = [row["logprobs"] for output in outputs for row in output.loss_fn_outputs]
    return compute_mean_nll(logprobs, [datum.loss_fn_inputs["weights"] for datum in datums])
