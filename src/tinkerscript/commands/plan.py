"""`tinkerscript train --plan`: what a config starts, and where its model calls go, without starting it."""

from __future__ import annotations

import shlex
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tinkerscript.config import EngineConfig, LaunchConfig, RunConfig, load_config
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import base_of_adapter, model_folder
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import TRAINER, PlannedProcess, plan_of

if TYPE_CHECKING:
    import torch

    from tinkerscript.engine.memory import Memory, Workload

PROMPT_TOKENS = 1024
"""Of the prompts that the memory for sampling is computed for; how long they are is known when they come."""

GIB = 2**30


def print_plan(path: Path | None, overrides: list[str], console: Console) -> None:
    """Print the plan of a config. Raises ConfigError."""
    if path is None:
        raise ConfigError("--plan: give a CONFIG")
    for line in plan(load_config(path, overrides)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def plan(config: RunConfig) -> list[str]:
    """Lines for the terminal."""
    return [*_processes(config), *_commands(config), *_memory(config), *_calls(config), *_numbers(config)]


def _processes(config: RunConfig) -> list[str]:
    launch, workers = config.inference.launch, config.workers
    lines = ["processes", f"  trainer              {_trainer(config.engine)}"]
    if not config.enable_tinkerscript_mode or config.method == "sft":
        return [*lines, "  (everything in this one)"]
    section = config.interchange_server
    port = section.interchange_server_port or "a free port"
    lines.append(f"  interchange server   {section.interchange_server_host}, port {port}")
    for number in range(launch.replicas):
        where = _gpus_of(launch, number)
        lines.append(
            f"  {f'{config.inference.server_name} replica {number}':<20} {where}, {launch.python or 'python'}"
        )
    for url in config.inference.replicas:
        lines.append(f"  {f'{config.inference.server_name} replica':<20} runs already at {url}")
    tasks = ", ".join(task.name for task in config.all_tasks)
    what = workers.script or tasks or "clients' own samples"
    if workers.count:
        lines.append(
            f"  {f'{workers.count} workers':<20} {workers.concurrency} episodes each at once: {what}"
        )
    else:
        lines.append(f"  no workers           start some with `tinkerscript worker`: {what}")
    return lines


def _gpus_of(launch: LaunchConfig, number: int) -> str:
    if launch.gpus == "any":
        return f"{launch.tensor_parallel} GPU of Ray's choice"
    first = number * launch.tensor_parallel
    gpus = launch.gpus[first : first + launch.tensor_parallel]
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "no GPU"


def _commands(config: RunConfig) -> list[str]:
    """What the launcher starts: the same, on one machine or on many."""
    folder = config.new_folder(datetime.now())
    lines = [f"commands ({_launcher(config)})"]
    for _, group in groupby(plan_of(config, folder), key=_alike):
        first, *more = group
        name = f"{first.name}-{more[-1].name.split()[-1]}" if more else first.name
        room = first.room
        facts = [
            f"{room.cpus:g} CPU" + (f" and {room.gpus} GPU" if room.gpus else "") + (" each" if more else ""),
            *(["beside the trainer"] if first.is_beside and first.name != TRAINER else []),
            *([f"after the {' and the '.join(first.after)}"] if first.after else []),
            *(["while episodes wait"] if first.on_demand else []),
            *([f"restarted {first.restarts} times at most"] if first.restarts else []),
            *([f"gets {', '.join(first.secrets)} if set"] if first.secrets else []),
        ]
        lines.append(f"  {name:<20} {', '.join(facts)}")
        own = dict(first.environment) | ({"RANK": name.split()[-1]} if "RANK" in first.environment else {})
        settings = [f"{key}={_quoted(value)}" for key, value in own.items()]
        lines += [f"    {setting} \\" for setting in settings]
        lines.append(f"    {' '.join(_quoted(word) for word in first.command)}")
    return lines


def _launcher(config: RunConfig) -> str:
    cluster = config.cluster
    if cluster.launcher == "local":
        return "on this machine"
    return f"Ray at {cluster.address}" if cluster.address else "a Ray of its own on this machine"


def _alike(process: PlannedProcess) -> tuple[object, ...]:
    """The same for processes that differ only in their number."""
    kind = process.name.rpartition(" ")[0] or process.name
    environment = tuple((key, value) for key, value in process.environment.items() if key != "RANK")
    return kind, process.command, environment, process.on_demand


def _quoted(word: str) -> str:
    return word if isinstance(word, Slot) else shlex.quote(word)


def _trainer(engine: EngineConfig) -> str:
    if engine.backend == "tinker":
        return (
            f"no GPU; the Tinker service at {engine.base_url or 'TINKER_BASE_URL, or the hosted one'} trains"
        )
    trains = f"LoRA adapter of rank {engine.lora.rank}" if engine.lora.rank else "all weights"
    devices = f"{engine.devices} times " if engine.devices > 1 else ""
    return f"{devices}{engine.device}, {engine.dtype}: {trains} of {engine.model}"


def _memory(config: RunConfig) -> list[str]:
    """What the devices of the trainer and of the replicas hold."""
    engine, launch = config.engine, config.inference.launch
    if engine.backend == "tinker":
        return []
    try:
        memory, work = _formula(config)
        frozen = _frozen(config)
    except ModuleNotFoundError as error:
        return ["memory", f"  not known: {error.name} is not installed here"]
    except ConfigError as error:
        return ["memory", f"  not known: {error}"]
    parts = engine.devices if engine.sharding == "shard" else 1
    held = memory.weights + memory.adapters + memory.gradients + memory.moments
    made = memory.activations + memory.logits
    each = " on each device" if engine.devices > 1 else ""
    whole = f"; the first device also {_gib(memory.weights)}, to sample" if parts > 1 else ""
    lines = [
        "memory, by the formula of docs/engine.md",
        f"  to train             {_gib(held // parts + made)}{each}: {_gib(held // parts)} of weights and "
        f"AdamW's moments, {_gib(made)} for a microbatch of {work.tokens:,} tokens{whole}",
    ]
    if work.rows:
        lines.append(
            f"  to sample            {_gib(memory.sampling - memory.weights - memory.adapters)} more, for "
            f"{work.rows} sequences of {work.length:,} tokens; {_gib(memory.total)} in all"
        )
    beside = (memory.adapters or memory.weights) + memory.gradients + memory.moments
    lines += [
        f"  {name:<20} {_gib(beside)} of weights and AdamW's moments, trained beside the policy"
        for name in config.trained_roles
    ]
    lines += frozen
    if launch.replicas:
        share = memory.weights // launch.tensor_parallel
        name = config.inference.server_name
        lines.append(f"  {name:<20} {_gib(share)} of weights a GPU, and its cache beside them")
    return lines


def _frozen(config: RunConfig) -> list[str]:
    """What the frozen roles hold beside the model that trains: each base once.

    Raises ConfigError for a model that is not there.
    """
    from transformers import AutoConfig

    from tinkerscript.engine.memory import frozen_memory

    engine = config.engine
    held = {model_folder(engine.model).resolve()} if engine.lora.rank else set[Path]()
    lines: list[str] = []
    for name, role in config.roles.items():
        if role.kind != "frozen" or role.base_url:
            continue
        folder = model_folder(role.model or (not engine.lora.rank and engine.checkpoint) or engine.model)
        base = base_of_adapter(folder) or folder
        if base.resolve() in held:
            lines.append(f"  {name:<20} nothing more: its weights are there already")
            continue
        held.add(base.resolve())
        model = AutoConfig.from_pretrained(base, local_files_only=True)
        amount = frozen_memory(model, _dtype(engine))
        lines.append(f"  {name:<20} {_gib(amount)} of weights, frozen, on the first device")
    return lines


def _dtype(engine: EngineConfig) -> torch.dtype:
    """Of the engine's products, as far as it can be told from here."""
    import torch

    from tinkerscript.engine.context import compute_dtype

    is_auto_on_gpu = engine.dtype == "auto" and torch.device(engine.device).type == "cuda"
    return torch.bfloat16 if is_auto_on_gpu else compute_dtype(engine.dtype, "cpu")


def _formula(config: RunConfig) -> tuple[Memory, Workload]:
    """The memory of the trainer, and what it is computed for.

    Raises ConfigError for a model whose config cannot be had.
    """
    import torch
    from transformers import AutoConfig

    from tinkerscript.engine.context import exact_context
    from tinkerscript.engine.decoder import logits_rows
    from tinkerscript.engine.memory import Workload, peak_memory
    from tinkerscript.engine.training import tokens_of_microbatch
    from tinkerscript.engine.weights import LoraSettings

    engine, lora = config.engine, config.engine.lora
    model = AutoConfig.from_pretrained(model_folder(engine.model), local_files_only=True)
    device = torch.device(engine.device)
    samples = not config.inference.has_replicas and config.method != "sft"
    at_once = config.workers.count * config.workers.concurrency or engine.max_batch
    work = Workload(
        tokens=tokens_of_microbatch(device),
        logits_rows=logits_rows(model.get_text_config().vocab_size, device),
        activation_checkpointing=engine.activation_checkpointing,
        samplers=1 + config.training.max_policy_lag if samples else 0,
        rows=min(engine.max_batch, at_once) if samples else 0,
        prompt=PROMPT_TOKENS,
        length=min(PROMPT_TOKENS + config.sampling.max_tokens, exact_context(model)),
    )
    settings = LoraSettings(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None
    return peak_memory(model, settings, _dtype(engine), work), work


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB / 10 else f"{amount / 2**20:.0f} MiB"


def _calls(config: RunConfig) -> list[str]:
    if config.method == "sft":
        return []
    inference = config.inference
    number = inference.launch.replicas + len(inference.replicas)
    if number:
        last = f"one of {number} {inference.server_name} replicas, the same for all calls of an episode"
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
