"""`tinkerscript train --plan` shows a config's processes, memory and disk, and where its model calls go."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinkerscript.config import RECIPES, EngineConfig, RunConfig, load_config
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import base_of_adapter, model_folder
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import TRAINER_PROCESS, PlannedProcess, plan_of
from tinkerscript.train.defaults import rates_of, resolved

if TYPE_CHECKING:
    import torch

    from tinkerscript.engine.memory import Memory, Workload
    from tinkerscript.train.samples import TaskSamples

ASSUMED_PROMPT_TOKENS = 1024
"""Used when clients register the samples."""

TEMPLATE_TOKENS = 64

MEASURED_SAMPLES = 200


def print_plan(path: Path | None, overrides: list[str], console: Console) -> None:
    if path is None:
        raise ConfigError("--plan: give a CONFIG")
    for line in plan(load_config(path, overrides)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def plan(config: RunConfig) -> list[str]:
    @cache
    def samples() -> TaskSamples:
        from tinkerscript.train.samples import TaskSamples

        return TaskSamples(config.all_tasks, seed=config.seed)

    return [
        *_processes(_with_defaults(config)),
        *_memory(config, samples),
        *_calls(config),
        *_recipe(config),
        *_learning_rate(config),
        *_numbers(config, samples),
    ]


def _with_defaults(config: RunConfig) -> RunConfig:
    try:
        return resolved(config, model_folder(config.engine.model))[0]
    except (ConfigError, OSError):  # `_memory` explains the error.
        return config


def _line(name: str, text: str) -> str:
    return f"  {name:<20} {text}"


def _processes(config: RunConfig) -> list[str]:
    cluster, ray = config.cluster, "a new Ray cluster on this machine"
    where = "this machine" if cluster.launcher == "local" else cluster.address or ray
    lines = [f"processes that the run starts, on {where}", _line("to train", _trainer(config.engine))]
    for _, group in groupby(plan_of(config, config.new_folder(datetime.now())), key=_alike):
        first, *more = group
        name = f"{first.name}-{more[-1].name.split()[-1]}" if more else first.name
        room = first.resources
        gpus = f" and {room.gpus} GPU" if room.gpus else ""
        facts = [
            *([f"{room.cpus:g} CPU{gpus}{' each' if more else ''}"] if room.cpus else []),
            *(["with the trainer"] if first.on_trainer_machine and first.name != TRAINER_PROCESS else []),
            *([f"after the {' and the '.join(first.after)}"] if first.after else []),
            *([f"restarted at most {first.restarts} times"] if first.restarts else []),
            *([f"gets {', '.join(first.secrets)} if set"] if first.secrets else []),
        ]
        own = dict(first.environment) | ({"RANK": name.split()[-1]} if "RANK" in first.environment else {})
        lines += [
            _line(name, ", ".join(facts)),
            *(f"    {key}={_quoted(value)} \\" for key, value in own.items()),
            f"    {' '.join(_quoted(word) for word in first.command)}",
        ]
    lines += [_line("vLLM replica", f"runs already at {url}") for url in config.inference.replicas]
    return lines


def _alike(process: PlannedProcess) -> tuple[object, ...]:
    # Processes that differ only in number are shown once.
    kind = process.name.rpartition(" ")[0] or process.name
    environment = tuple((key, value) for key, value in process.environment.items() if key != "RANK")
    return kind, process.command, environment


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


def _memory(config: RunConfig, samples: Callable[[], TaskSamples]) -> list[str]:
    engine, launch = config.engine, config.inference.launch
    if engine.backend == "tinker":
        return []
    try:
        prompt = _prompt_tokens(config, samples)
        memory, work = _formula(config, prompt)
        frozen = _frozen(config)
    except ModuleNotFoundError as error:
        return ["memory", f"  not known: {error.name} is not installed here"]
    except ConfigError as error:
        return ["memory", f"  not known: {error}"]
    parts = engine.devices if engine.sharding == "shard" else 1
    held, made = memory.held // parts, memory.activations + memory.logits
    each = " on each device" if engine.devices > 1 else ""
    whole = f"; the first device also {_gib(memory.weights)}, to sample" if parts > 1 else ""
    lines = [
        "memory, by the formula of docs/engine.md",
        _line(
            "to train",
            f"{_gib(held + made)}{each}: {_gib(held)} of weights and AdamW's moments, {_gib(made)} for a "
            f"microbatch of {work.tokens:,} tokens{whole}",
        ),
    ]
    wanted = config.sampling.reply_tokens
    if work.rows and work.length < prompt + wanted:
        text = f"{wanted:,} do not fit the context of {work.length:,} after a prompt of {prompt:,}"
        lines.append(_line("sampling.max_tokens", f"{text}; replies are cut off earlier"))
    if work.rows:
        more = _gib(memory.sampling - memory.weights - memory.adapters)
        text = f"{work.rows} sequences of {work.length:,} tokens; {_gib(memory.total)} in all"
        lines.append(_line("to sample", f"{more} more, for {text}"))
    beside = _gib((memory.adapters or memory.weights) + memory.gradients + memory.moments)
    for name in config.trained_roles:
        lines.append(_line(name, f"{beside} of weights and AdamW's moments, trained like the policy"))
    lines += frozen
    if launch.replicas:
        share = _gib(memory.weights // launch.tensor_parallel)
        lines.append(_line("vLLM", f"{share} of weights per GPU, plus its cache"))
    kept, calls = config.training.keep_checkpoints, _gib(config.recording_limit_mb * 2**20)
    disk = f"{_gib(_checkpoints(config, memory))}: {kept} that are kept and one being written"
    lines += [
        "disk",
        _line("checkpoints", f"{disk}, {_gib(memory.checkpoint)} each"),
        _line("episodes", f"at most {calls} of calls, tokens and transcripts (recording_limit_mb)"),
    ]
    if problem := _without_room(config, memory, config.new_folder(datetime.now())):
        lines.append(f"will not fit: {problem}")
    elif warning := _too_much(config, memory):
        lines.append(f"may not fit: {warning}")
    return lines


def _frozen(config: RunConfig) -> list[str]:
    """Counts each base model once."""
    from transformers import AutoConfig

    from tinkerscript.engine.memory import frozen_memory

    engine = config.engine
    held = {model_folder(engine.model).resolve()} if engine.lora.rank else set[Path]()
    lines: list[str] = []
    for name, role in config.roles.items():
        if role.kind != "frozen" or role.base_url:
            continue
        folder = model_folder(role.model or (not engine.lora.rank and engine.checkpoint) or engine.model)
        base = (base_of_adapter(folder) or folder).resolve()
        text = "nothing more: its weights are there already"
        if base not in held:
            held.add(base)
            amount = frozen_memory(AutoConfig.from_pretrained(base, local_files_only=True), _dtype(engine))
            text = f"{_gib(amount)} of weights, frozen, on the first device"
        lines.append(_line(name, text))
    return lines


def _dtype(engine: EngineConfig) -> torch.dtype:
    """Guess the dtype without access to the device."""
    import torch

    from tinkerscript.engine.context import compute_dtype

    is_auto_on_gpu = engine.dtype == "auto" and torch.device(engine.device).type == "cuda"
    return torch.bfloat16 if is_auto_on_gpu else compute_dtype(engine.dtype, "cpu")


def _formula(config: RunConfig, prompt: int) -> tuple[Memory, Workload]:
    import torch
    from transformers import AutoConfig

    from tinkerscript.engine.context import exact_context
    from tinkerscript.engine.decoder import logits_rows
    from tinkerscript.engine.memory import Workload, peak_memory
    from tinkerscript.engine.routing import most_token_bytes
    from tinkerscript.engine.training import tokens_of_microbatch
    from tinkerscript.engine.weights import LoraSettings

    engine, lora, training = config.engine, config.engine.lora, config.training
    model = AutoConfig.from_pretrained(model_folder(engine.model), local_files_only=True)
    device = torch.device(engine.device)
    length = min(prompt + config.sampling.reply_tokens, exact_context(model))
    tokens = tokens_of_microbatch(device)
    if config.method != "sft":
        tokens = max(length, min(tokens, training.groups_per_step * training.group_size * length))
    samples = not config.inference.has_replicas and config.method != "sft"
    at_once = config.workers.count * config.workers.concurrency or engine.max_batch
    work = Workload(
        tokens=tokens,
        logits_rows=logits_rows(model.get_text_config().vocab_size, device),
        activation_checkpointing=engine.activation_checkpointing,
        samplers=1 + config.max_policy_lag if samples else 0,
        rows=min(engine.max_batch, at_once) if samples else 0,
        prompt=min(prompt, length),
        length=length,
        choices=most_token_bytes(model) if engine.routing_replay else 0,
        quantization=engine.quantization,
    )
    settings = LoraSettings(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None
    return peak_memory(model, settings, _dtype(engine), work), work


def _prompt_tokens(config: RunConfig, samples: Callable[[], TaskSamples]) -> int:
    if not config.all_tasks or config.method == "sft":
        return ASSUMED_PROMPT_TOKENS
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(model_folder(config.engine.model) / "tokenizer.json"))
    inputs = [str(samples().payload_at(place)["sample"]["input"]) for place in range(MEASURED_SAMPLES)]
    return TEMPLATE_TOKENS + max(len(encoding.ids) for encoding in tokenizer.encode_batch(inputs))


def check_fits(config: RunConfig, folder: Path, note: Callable[[str], None]) -> None:
    """Refuse what cannot fit: weights, optimizer, checkpoints. Call `note` if the largest batches may not."""
    if config.engine.backend == "tinker":
        return
    try:
        memory, _ = _formula(config, ASSUMED_PROMPT_TOKENS)
    except (OSError, ValueError, RuntimeError):  # The engine explains the error.
        return
    if problem := _without_room(config, memory, folder):
        raise ConfigError(problem)
    if warning := _too_much(config, memory):
        note(f"may not fit: {warning}")


def _without_room(config: RunConfig, memory: Memory, folder: Path) -> str:
    """Return a message, or "" if the smallest batch fits."""
    from tinkerscript.engine.memory import available_memory

    engine = config.engine
    held = memory.held // (engine.devices if engine.sharding == "shard" else 1)
    room = available_memory(engine.device)
    if room is not None and held > room:
        remedy = "a smaller engine.model" if engine.lora.rank else "engine.lora.rank=16, or a smaller model"
        return (
            f"engine.model: {engine.model} will not fit: its weights, gradients and AdamW's moments take "
            f"{_gib(held)}, and {engine.device} has {_gib(room)} free; use {remedy}"
        )
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    disk, room = _checkpoints(config, memory), shutil.disk_usage(place).free
    if disk > room:
        return (
            f"experiment_dir: the checkpoints will not fit: {config.training.keep_checkpoints + 1} of "
            f"{_gib(memory.checkpoint)} take {_gib(disk)}, and the disk of {place} has {_gib(room)} free; "
            "name a folder on another disk, or lower training.keep_checkpoints"
        )
    return ""


def _too_much(config: RunConfig, memory: Memory) -> str:
    """Return a message, or "" if the largest batches fit."""
    from tinkerscript.engine.memory import available_memory

    engine = config.engine
    room = available_memory(engine.device)
    if engine.sharding == "shard" or room is None or memory.total <= room:
        return ""
    ways = {
        "engine.activation_checkpointing=true": not engine.activation_checkpointing,
        "engine.lora.rank=16": not engine.lora.rank,
        "a lower workers.concurrency": True,
    }
    return (
        f"training and sampling take up to {_gib(memory.total)} with {engine.model}, and {engine.device} has "
        f"{_gib(room)} free; to need less, use {' or '.join(way for way, helps in ways.items() if helps)}"
    )


def _checkpoints(config: RunConfig, memory: Memory) -> int:
    return (config.training.keep_checkpoints + 1) * memory.checkpoint


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 / 10 else f"{amount / 2**20:.0f} MiB"


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
    way = ["worker", "interchange server", "trainer"]
    here = "" if config.enable_tinkerscript_mode else " (in one process: enable_tinkerscript_mode)"
    lines = ["model calls", f"  {' -> '.join([*way, last])}{here}"]
    if number:
        running = {
            "move": "move to the newest",
            "finish": "finish with their own",
            "continue": "and their calls continue with the newest",
        }[inference.on_publish]
        lines.append(
            f"  {config.live_versions} live versions and a free slot, of {inference.max_loras} (max_loras); "
            f"running episodes {running}"
        )
    return lines


def _recipe(config: RunConfig) -> list[str]:
    training = config.training
    if not training.recipe or config.method == "sft":
        return []
    recipe, chosen = RECIPES[training.recipe], training.model_dump(mode="json")
    lines = ["recipe", f"  {training.recipe}: {recipe.source}"]
    for key, value in recipe.keys.items():
        names = (
            {key: value} if not isinstance(value, dict) else {f"{key}.{name}": v for name, v in value.items()}
        )
        for name, own in names.items():
            section, _, last = name.rpartition(".")
            found = (chosen[section] if section else chosen).get(last)
            lines.append(f"    {name}: {found}" + ("" if found == own else f", yours in place of {own}"))
    return lines


def _learning_rate(config: RunConfig) -> list[str]:
    try:
        folder = model_folder(config.engine.model)
        chosen, notes = resolved(config, folder)
        trains = rates_of(config, folder).trains
    except ConfigError:
        return []  # `_memory` explains the error.
    said = notes if config.training.learning_rate else ()
    rate = f"  {chosen.training.learning_rate:g}, for {trains}"
    return ["learning rate", rate, *(f"  {note}" for note in said)]


def _numbers(config: RunConfig, samples: Callable[[], TaskSamples]) -> list[str]:
    training = config.training
    if config.method == "sft":
        return []
    workers = config.workers
    number = workers.count if config.enable_tinkerscript_mode else min(workers.count, 1)
    limit = f", at most {number * workers.concurrency} at once" if number else ""
    steps = f"{training.steps} steps of {training.groups_per_step} groups of {training.group_size}"
    lines = ["episodes", f"  {steps}: {training.groups_per_step * training.group_size} a step{limit}"]
    if config.evaluation.episodes:
        lines.append(f"  {_evaluation(config, samples)}")
    if config.evaluation.every_steps and config.all_tasks:
        lines.append(f"  {_interim(config)}")
    return lines


def _interim(config: RunConfig) -> str:
    given, inference = config.evaluation, config.inference
    steps = f"{given.every_steps} steps" if given.every_steps > 1 else "step"
    often = f"{given.interim_episodes:,} to evaluate, after every {steps}"
    if config.engine.backend == "tinker" or (inference.has_replicas and config.held_versions < 1):
        return f"{often}: training waits for them, as what samples holds no older weights beside the newest"
    beside = f"{often}, beside training: at most {given.share:.0%} of the episodes{_delay(config)}"
    return beside if config.engine.lora.rank else f"{beside}, if a second copy of the weights is small enough"


def _delay(config: RunConfig) -> str:
    """How many steps an evaluation beside training takes, if it is not over before the next one is due."""
    given, training = config.evaluation, config.training
    trained = training.groups_per_step * training.group_size
    if given.share == 1:
        return ""
    steps = math.ceil(given.interim_episodes * (1 - given.share) / given.share / trained)
    if steps <= given.every_steps:
        return ""
    needed = given.interim_episodes / (given.interim_episodes + trained * given.every_steps)
    share = math.ceil(100 * needed) / 100
    return f", so one takes {steps} steps, or {given.every_steps} with evaluation.share={share}"


def _evaluation(config: RunConfig, samples: Callable[[], TaskSamples]) -> str:
    episodes = config.evaluation.episodes
    often = f"{episodes:,} to evaluate, before and after training"
    if not config.all_tasks:
        return often
    try:
        shared, number = samples().trained_too(episodes)
    except (ConfigError, ModuleNotFoundError):  # `_memory` explains the error.
        return often
    if not shared:
        return f"{episodes:,} held out, before and after training"
    return f"{often}; not held out: {shared:,} of their {number:,} samples are trained on too"
