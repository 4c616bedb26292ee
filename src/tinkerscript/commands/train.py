"""`tinkerscript train` is everything around a run, from checking the config to the final summary.

Checks that need no torch run before its import.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tinkerscript.access_tokens import Roles
from tinkerscript.addresses import bind_http
from tinkerscript.commands.plan import check_fits
from tinkerscript.commands.show import health_lines, say
from tinkerscript.config import RUNS, RunConfig, load_config
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.dashboard.terminal import (
    LineReporter,
    TableReporter,
    open_in_browser,
    print_summary,
    print_wrapped,
    shown_progress,
)
from tinkerscript.errors import ConfigError, StoreError, TinkerScriptError
from tinkerscript.files import is_disk_full, resolve_link
from tinkerscript.ledger import is_here
from tinkerscript.ledger.health import BestScore, HealthRow, best_score, health_rows, verdict
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.lifecycle import hold_lock, without_garbage_collection
from tinkerscript.model_folder import pinned_model, same_model
from tinkerscript.remote_folder import Uploads, is_url, name_of, resumable_folder
from tinkerscript.train.identity import check_unused, check_whole, holds_run
from tinkerscript.train.run_folder import steps_finished
from tinkerscript.workers.base_task import check_is_there

Train = Callable[[ProgressReporter, Path | None], Coroutine[Any, Any, object]]


WORSE = 3
"""Exit code if the model got worse or nothing trained."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""torchrun sets these for each process, besides WORLD_SIZE."""


async def train_command(
    path: Path | None,
    overrides: list[str],
    console: Console,
    *,
    resume: Path | None,
    join: Path | None,
    opens: bool = False,
) -> int:
    """Returns 0, 1 if episodes were lost, or `WORSE`.

    `resume` is the folder of a run to resume, `join` that of a running server.
    """
    config, folder = open_run(path, overrides, resume=resume, join=join)
    if resume and (message := _finished(config, folder)):
        await _copy_rest(config, folder, console)
        _print(console, message)
        return 0
    config = _pinned(config, console)
    fresh = resume is None and join is None
    if fresh and config.method == "grpo":
        if config.workers.script and config.workers.count:
            check_is_there(Path(config.workers.script))
        Roles.of(config.interchange_server, os.environ)
        bind_http(config.interchange_server, None).close()
    if fresh:
        check_unused(folder)
    else:
        check_whole(folder)
    begin = ["train", str(path), "--join"] if join else ["train", "--resume"]
    again = shlex.join(["tinkerscript", *begin, str(folder)])
    try:
        joins = join is not None
        with shown_progress(console) as progress:
            on_page = _page_shower(progress, opens=opens)
            await _train(config, folder, progress, on_page, is_new=fresh, join=joins, again=again)
    except Exception as error:
        is_full = is_disk_full(error)
        if holds_run(folder) and (is_full or isinstance(error, TinkerScriptError)):
            _print(console, f"once the cause is fixed, resume with: {again}")
        if is_full:
            full = min((folder, *_store_folder(config)), key=lambda place: shutil.disk_usage(place).free)
            raise ConfigError(f"the disk of {full} is full; finished work is not lost") from error
        raise
    if config.method == "sft":
        _report_sft(console, folder)
        return 0
    return report(console, config, folder)


def resumed(name: str | None, console: Console) -> Path | None:
    if name is None or not is_url(name):
        return None if name is None else Path(name)
    RUNS.mkdir(exist_ok=True)
    with hold_lock(RUNS / f".{name_of(name)}.lock"):  # Other ranks may download it too.
        return resumable_folder(name, RUNS, note=lambda text: _print(console, text))


async def _copy_rest(config: RunConfig, folder: Path, console: Console) -> None:
    if is_url(config.experiment_dir):
        async with Uploads(folder, config.experiment_dir, partial(_print, console)) as uploads:
            await uploads.finish()


async def _train(
    config: RunConfig,
    folder: Path,
    progress: ProgressReporter,
    on_page: Callable[[str], None],
    *,
    is_new: bool,
    join: bool,
    again: str,
) -> None:
    with progress.waiting("torch, transformers and Inspect to load"):
        train = _import_training(config, join, on_page)
        check_fits(config, folder, progress.note)
    running = asyncio.create_task(train(progress, None if is_new else folder))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        progress.note(f"stopping; resume with: {again}")
        running.cancel()
        with progress.waiting("the run to stop"):
            await running


def _page_shower(progress: LineReporter | TableReporter, *, opens: bool) -> Callable[[str], None]:
    def show(url: str) -> None:
        if isinstance(progress, TableReporter):
            progress.page(url)
        if opens:
            open_in_browser(url, progress.note)

    return show


def is_follower(path: Path | None, overrides: list[str], *, resume: Path | None, join: Path | None) -> bool:
    """Whether a launcher such as torchrun started us as a rank above 0."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return False
    config, _ = open_run(path, overrides, resume=resume, join=join)
    if size != str(config.engine.devices):
        raise ConfigError(
            f"engine.devices: {config.engine.devices}, but a launcher started {size} processes (WORLD_SIZE); "
            f"add --set engine.devices={size}, or start one process"
        )
    if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is {size}, and the environment lacks {', '.join(missing)}")
    return os.environ["RANK"] != "0"


def follow_command() -> None:
    with without_garbage_collection():
        from tinkerscript.engine.distributed import follow

    follow()


def open_run(
    path: Path | None, overrides: list[str], *, resume: Path | None, join: Path | None
) -> tuple[RunConfig, Path]:
    if resume is not None:
        if path is not None or join is not None:
            raise ConfigError("--resume uses the run's own config: give no CONFIG and no --join with it")
        resume = resolve_link(resume)
        if not (resume / "config.yaml").exists():
            raise ConfigError(f"--resume: there is no run in {resume}")
        return load_config(resume / "config.yaml", overrides), resume
    if path is None:
        raise ConfigError("give a CONFIG, or --resume RUN_DIR")
    config = load_config(path, overrides)
    if config.inference.samples_without_trainer:
        raise ConfigError(
            "inference.base_url names a server with fixed weights, which only `tinkerscript serve` can use; "
            "to train, name replicas in inference.replicas or start some with inference.launch.replicas"
        )
    if join is not None:
        if config.method == "sft":
            raise ConfigError("--join needs episodes, and method: sft has none")
        join = resolve_link(join)
        return _joining(config, join), join
    folder = config.new_folder(datetime.now())
    if is_url(config.experiment_dir):
        return config, folder
    return config.model_copy(update={"experiment_dir": str(folder)}), folder


def _pinned(config: RunConfig, console: Console) -> RunConfig:
    model = pinned_model(config.engine.model, note=lambda text: _print(console, text))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"model": model})})


def _joining(config: RunConfig, folder: Path) -> RunConfig:
    server = load_config(folder / "config.yaml")
    if not same_model(config.engine.model, server.engine.model):
        raise ConfigError(
            f"engine.model: the server in {folder} renders for {server.engine.model!r}, "
            f"but this config trains {config.engine.model!r}; use the same model"
        )
    changes = {
        "engine": config.engine.model_copy(update={"model": server.engine.model}),
        "interchange_server": server.interchange_server,
        "experiment_dir": server.experiment_dir if is_url(server.experiment_dir) else str(folder),
    }
    return config.model_copy(update=changes)


def _import_training(config: RunConfig, join: bool, on_page: Callable[[str], None]) -> Train:
    if config.method == "sft":
        with without_garbage_collection():
            from tinkerscript.train.sft import run_sft

        return lambda progress, path: run_sft(config, progress, path=path, on_page=on_page)
    with without_garbage_collection():
        from tinkerscript.train.run import run_training

    return lambda progress, path: run_training(config, progress, path=path, join=join, on_page=on_page)


def _finished(config: RunConfig, folder: Path) -> str:
    steps = steps_finished(folder)
    if steps is None:
        return ""
    if config.method == "sft":
        epochs = int(_summary(folder)["epochs"])
        done, more = epochs >= config.sft.epochs, f"sft.epochs={2 * epochs}"
    else:
        done, more = steps >= config.training.steps, f"training.steps={2 * steps}"
    return f"the run in {folder} is finished after {steps} steps; for more, add --set {more}" if done else ""


def _store_folder(config: RunConfig) -> list[Path]:
    scheme, _, path = config.interchange_server.store.partition("://")
    return [Path(path).parent] if scheme == "sqlite" and path else []


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def report(console: Console, config: RunConfig, folder: Path) -> int:
    summary = _summary(folder)
    print_summary(console, summary, folder)
    store = config.interchange_server.store
    again = str(folder) if is_here(store, folder) else "FOLDER, on the server's machine"
    best, rows, unknown = None, list[HealthRow](), ""
    try:
        ledger = LedgerReader(folder, store=store)
        best, rows = best_score(ledger), health_rows(ledger)
    except (ConfigError, StoreError) as error:  # Perhaps only the server reaches its database.
        unknown = f"not known: {error}"
    copied = f"copied to          {config.experiment_dir}\n" if is_url(config.experiment_dir) else ""
    _print(
        console,
        f"\nrun folder         {folder}   (learning_curve.png, rollouts/, metrics.jsonl)\n{copied}"
        f"{_use(config, folder, best)}\nlook at it again   tinkerscript view {again}",
    )
    if rows or unknown:
        _print(console, f"health             {unknown or verdict(rows)}")
        for line in health_lines(rows):
            say(console, line)
    if summary.get("episodes_lost"):
        return 1
    trained_nothing = bool(summary.get("steps")) and not summary.get("tokens_trained")
    if trained_nothing:
        say(console, f"nothing has trained: the weights are as they were (exit code {WORSE})", "red")
    elif best is not None:
        scores = f"{best.score:.3f} {best.label}, {best.last:.3f} now"
        say(console, f"the model is worse than it was: {scores} (exit code {WORSE})", "red")
    return WORSE if trained_nothing or best is not None else 0


def _use(config: RunConfig, folder: Path, best: BestScore | None) -> str:
    checkpoint = folder / "checkpoints" / "final"
    if best is not None:
        checkpoint = folder / "checkpoints" / f"step_{best.step:04d}"
        if not best.step:
            start = config.engine.checkpoint or config.engine.model
            return f"best by score      the model that the run started from, {start}: {best.score:.3f}"
        if not checkpoint.is_dir():
            return f"best by score      step {best.step}, {best.score:.3f}: its checkpoint was not kept"
    name = "serve the model " if best is None else "serve the best  "
    if config.engine.backend == "tinker":  # The service has the weights.
        return f"train from it      tinkerscript train CONFIG --set engine.checkpoint={checkpoint}"
    return f"{name}   tinkerscript serve --checkpoint {checkpoint}"


def _report_sft(console: Console, folder: Path) -> None:
    summary, checkpoint = _summary(folder), folder / "checkpoints" / "final"
    if summary["nll_before"] is not None:
        console.print(f"\nheld-out nll       {summary['nll_before']:.4f} -> {summary['nll_after']:.4f}")
    if "accuracy_before" in summary:
        shares = f"{summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}"
        console.print(f"held-out pairs     {shares} with the better episode preferred")
    _print(
        console,
        f"run folder         {folder}   (learning_curve.png, metrics.jsonl)\n"
        f"train from it      tinkerscript train CONFIG --set engine.checkpoint={checkpoint}\n"
        f"look at it again   tinkerscript view {folder}",
    )


def _print(console: Console, text: str) -> None:
    print_wrapped(console, text)
