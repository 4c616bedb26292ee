"""`tinkerscript train --plan`: what a config starts, and where its model calls go, without starting it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tinkerscript.config import EngineConfig, RunConfig, load_config
from tinkerscript.errors import ConfigError


def print_plan(path: Path | None, overrides: list[str], console: Console) -> None:
    """Print the plan of a config. Raises ConfigError."""
    if path is None:
        raise ConfigError("--plan: give a CONFIG")
    for line in plan(load_config(path, overrides)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def plan(config: RunConfig) -> list[str]:
    """Lines for the terminal."""
    return [*_processes(config), *_calls(config), *_numbers(config)]


def _processes(config: RunConfig) -> list[str]:
    launch, workers = config.inference.launch, config.workers
    lines = ["processes", f"  trainer              {_trainer(config.engine)}"]
    if not config.enable_tinkerscript_mode or config.method == "sft":
        return [*lines, "  (everything in this one)"]
    section = config.interchange_server
    port = section.interchange_server_port or "a free port"
    lines.append(f"  interchange server   {section.interchange_server_host}, port {port}")
    for number in range(launch.replicas):
        first = number * launch.tensor_parallel
        gpus = launch.gpus[first : first + launch.tensor_parallel]
        where = f"GPU {', '.join(map(str, gpus))}" if gpus else "no GPU"
        lines.append(f"  vLLM replica {number:<7} {where}, {launch.python or 'python'}")
    lines += [f"  vLLM replica         runs already at {each}" for each in config.inference.replicas]
    tasks = ", ".join(task.name for task in config.all_tasks)
    what = workers.script or tasks or "clients' own samples"
    if workers.count:
        lines.append(
            f"  {f'{workers.count} workers':<20} {workers.concurrency} episodes each at once: {what}"
        )
    else:
        lines.append(f"  no workers           start some with `tinkerscript worker`: {what}")
    return lines


def _trainer(engine: EngineConfig) -> str:
    if engine.backend == "tinker":
        return (
            f"no GPU; the Tinker service at {engine.base_url or 'TINKER_BASE_URL, or the hosted one'} trains"
        )
    trains = f"LoRA adapter of rank {engine.lora.rank}" if engine.lora.rank else "all weights"
    return f"{engine.device}, {engine.dtype}: {trains} of {engine.model}"


def _calls(config: RunConfig) -> list[str]:
    if config.method == "sft":
        return []
    inference = config.inference
    number = inference.launch.replicas + len(inference.replicas)
    if number:
        last = f"one of {number} vLLM replicas, the same for all calls of an episode"
    elif config.engine.backend == "tinker":
        last = "the Tinker service"
    else:
        last = f"its engine, at most {config.engine.max_batch} sequences at once"
    way = ["worker", "interchange server", "trainer"] if config.enable_tinkerscript_mode else ["trainer"]
    lines = ["model calls", f"  {' -> '.join([*way, last])}"]
    if number:
        running = "move to the newest" if inference.on_publish == "move" else "finish with their own"
        lines.append(
            f"  {config.live_versions} live versions and a free slot, of {inference.max_loras} (max_loras); "
            f"running episodes {running}"
        )
    return lines


def _numbers(config: RunConfig) -> list[str]:
    training = config.training
    if config.method == "sft":
        return []
    episodes = training.groups_per_step * training.group_size
    at_once = config.workers.count * config.workers.concurrency
    steps = f"{training.steps} steps of {training.groups_per_step} groups of {training.group_size}"
    limit = f", at most {at_once} at once" if at_once and config.enable_tinkerscript_mode else ""
    lines = ["episodes", f"  {steps}: {episodes} a step{limit}"]
    if config.evaluation.episodes:
        lines.append(f"  {config.evaluation.episodes} held out, before and after training")
    return lines
