"""The plan of a run, which `train --plan` prints and every launcher executes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN, FILE_SUFFIX, TOKEN_VARIABLES
from tinkerscript.config import EngineConfig, InferenceConfig, RunConfig
from tinkerscript.ledger.reader import STORE_VARIABLE
from tinkerscript.lifecycle import own_command
from tinkerscript.logs import FORMAT, LogFormat
from tinkerscript.processes.launcher import MAX_RESTARTS, Child, Resources, Slot
from tinkerscript.protocol import SERVER_URL
from tinkerscript.vllm_plugin import ADAPTERS, ADAPTERS_TOKEN, TRANSFER

SERVER_PROCESS = "interchange server"
TRAINER_PROCESS = "trainer"

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Accepted by `vllm serve --max-lora-rank`.

REPLICA_MODEL = "base"  # The model without an adapter.

KEY = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    name: str
    command: tuple[str, ...]
    """As a user would type it, with `Slot`s for values known only at the start."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: tuple[str, ...] = ()
    """Variables with keys, never on a command line."""

    withheld: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)
    on_trainer_machine: bool = False
    restarts: int = 0
    after: tuple[str, ...] = ()  # Must be ready first.

    @property
    def log(self) -> str:
        name = {SERVER_PROCESS: "server"}.get(self.name, self.name.removeprefix(f"{TRAINER_PROCESS} "))
        return f"{name.replace(' ', '-')}.log"

    def argv(self) -> list[str]:
        """Return a command for this Python that ends with its parent."""
        program, *arguments = self.command
        if program == "tinkerscript" and arguments[0] != "rank":
            return own_command(*arguments)
        with_parent = [sys.executable, "-m", "tinkerscript.processes.with_parent"]
        if program == "tinkerscript":
            return [*with_parent, sys.executable, "-m", "tinkerscript", *arguments]
        return [*with_parent, sys.executable if program == "python" else program, *arguments]

    def child(
        self,
        folder: Path,
        values: Callable[[int], Mapping[str, str]] = lambda incarnation: {},
        secrets: Mapping[str, str] | None = None,
    ) -> Child:
        """`values` returns the slot values of an incarnation; `secrets` maps variables to keys."""
        kept = {name: value for name, value in (secrets or {}).items() if name in self.secrets}
        first = values(0)

        def argv(incarnation: int) -> list[str]:
            return [_filled(word, values(incarnation)) for word in self.argv()]

        return Child(
            self.name,
            argv,
            folder / "logs" / self.log,
            environ={name: _filled(word, first) for name, word in self.environment.items()} | kept,
            withheld=self.withheld,
            resources=self.resources,
            on_trainer_machine=self.on_trainer_machine,
            max_restarts=self.restarts,
        )


def _filled(word: str, values: Mapping[str, str]) -> str:
    return values.get(word, word) if isinstance(word, Slot) else word


def plan_of(config: RunConfig, folder: Path) -> list[PlannedProcess]:
    """Return the processes, each after those that it waits for."""
    trainer = _trainer(config)
    page = [] if config.page_port == "off" else [page_process(config, folder)]
    if config.method == "sft":
        return [*trainer, *page]
    server, workers = list[PlannedProcess](), list[PlannedProcess]()
    if config.enable_tinkerscript_mode:  # Otherwise in the trainer.
        server = [server_process(folder, secrets=_of_server(config), log_format=config.log_format)]
        workers = _workers(config)
    children = [*trainer[1:], *_replicas(config), *workers]
    keys = config.key_variables
    return [
        *(_without(keys, each) for each in server),
        trainer[0],
        *page,
        *(_without(keys | TOKEN_VARIABLES, child) for child in children),
    ]


def _without(keys: Collection[str], process: PlannedProcess) -> PlannedProcess:
    return replace(process, withheld=tuple(sorted({*keys} - {*process.secrets})))


def server_process(
    folder: Path,
    *,
    secrets: tuple[str, ...] = (),
    serve_model: bool = False,
    log_format: LogFormat = "text",
) -> PlannedProcess:
    options = ["--run-dir", str(folder), *(["--serve-model"] if serve_model else [])]
    return PlannedProcess(
        SERVER_PROCESS,
        ("tinkerscript", "server", *options),
        environment=_logging(log_format),
        secrets=(CLIENT_TOKEN, ADMIN_TOKEN, *secrets),
        on_trainer_machine=True,
        restarts=MAX_RESTARTS,
    )


def page_process(
    config: RunConfig, folder: Path, *options: str, max_restarts: int = MAX_RESTARTS
) -> PlannedProcess:
    elsewhere = () if config.interchange_server.store == "sqlite" else (STORE_VARIABLE,)
    page = PlannedProcess(
        "page",
        ("tinkerscript", "view", str(folder), *options),
        secrets=(ADMIN_TOKEN, f"{ADMIN_TOKEN}{FILE_SUFFIX}", *elsewhere),
        resources=Resources(0),  # Usually idle.
        on_trainer_machine=True,
        restarts=max_restarts,
        after=(TRAINER_PROCESS,),
    )
    return _without(config.key_variables | TOKEN_VARIABLES, page)


def _of_server(config: RunConfig) -> tuple[str, ...]:
    # The trainer uses the key of a frozen role's server.
    outside = (role.api_key_env for role in config.roles.values() if role.kind == "outside")
    return (*(client.token_env for client in config.interchange_server.clients), *filter(None, outside))


def _logging(format: LogFormat) -> dict[str, str]:
    return {} if format == "text" else {FORMAT: format}


def _trainer(config: RunConfig) -> list[PlannedProcess]:
    engine = config.engine
    resources = Resources(cpus=max(1, engine.threads), gpus=int(engine.device.startswith("cuda")))
    after = (SERVER_PROCESS,) if config.enable_tinkerscript_mode and config.method == "grpo" else ()
    rank_0 = PlannedProcess(
        TRAINER_PROCESS,
        ("tinkerscript", "train", Slot.CONFIG),
        resources=resources,
        on_trainer_machine=True,
        after=after,
    )
    meeting = {"MASTER_ADDR": Slot.MASTER, "MASTER_PORT": Slot.MASTER_PORT}
    ranks = [
        PlannedProcess(
            f"{TRAINER_PROCESS} rank {rank}",
            ("tinkerscript", "rank"),
            environment={"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(engine.devices), **meeting},
            resources=resources,
            after=after,
        )
        for rank in range(1, engine.devices)
    ]
    return [rank_0, *ranks]


def _replicas(config: RunConfig) -> list[PlannedProcess]:
    engine, inference = config.engine, config.inference
    launch = inference.launch
    secrets = (KEY, ADAPTERS_TOKEN)
    return [
        PlannedProcess(
            f"replica {number}",
            tuple(_replica_command(engine, inference)),
            environment=_replica_environment(engine, inference, number),
            secrets=(*secrets, *config.cluster.environment),
            resources=Resources(launch.cpus, launch.tensor_parallel if launch.gpus else 0),
            restarts=MAX_RESTARTS,
            after=(SERVER_PROCESS,),
        )
        for number in range(launch.replicas)
    ]


def _replica_command(engine: EngineConfig, inference: InferenceConfig) -> list[str]:
    launch = inference.launch
    return [
        *(launch.python or "python", "-m"),
        *_vllm(engine, inference),
        *("--served-model-name", REPLICA_MODEL),
        *("--host", Slot.HOST, "--port", Slot.PORT),
        *("--dtype", engine.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        *launch.args,
    ]


def _vllm(engine: EngineConfig, inference: InferenceConfig) -> list[str]:
    rank = next((each for each in RANKS if each >= engine.lora.rank), engine.lora.rank)
    adapters = [
        "--enable-lora",
        *("--max-lora-rank", str(rank), "--max-loras", str(inference.max_loras)),
        *("--max-cpu-loras", str(inference.max_loras)),
    ]
    whole = ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
    return [
        "vllm.entrypoints.openai.api_server",
        *("--model", Slot.MODEL),
        *(adapters if engine.lora.rank else whole),
        *(["--enable-sleep-mode"] if inference.sleep and inference.launch.gpus else []),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *([] if inference.launch.gpus else ["--enforce-eager"]),
    ]


def _replica_environment(engine: EngineConfig, inference: InferenceConfig, number: int) -> dict[str, str]:
    launch = inference.launch
    first = number * launch.tensor_parallel
    named = [] if launch.gpus == "any" else launch.gpus
    gpus = ",".join(map(str, named[first : first + launch.tensor_parallel]))
    vllm = {
        # The plugin finds an adapter when a request names it.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        ADAPTERS: Slot.ADAPTERS,
        # vLLM replaces all weights, and sleeps, only in development mode.
        **({"VLLM_SERVER_DEV_MODE": "1"} if inference.sleep or not engine.lora.rank else {}),
    }
    return {
        **vllm,
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        **launch.env,
    }


def _workers(config: RunConfig) -> list[PlannedProcess]:
    workers = config.workers
    return [
        PlannedProcess(
            f"worker {number}",
            (
                *("tinkerscript", "worker", *worker_arguments(config)),
                *("--concurrency", str(workers.concurrency)),
                *("--allow-discard-timeout", str(workers.allow_discard_timeout)),
                *("--client-uuid", Slot.CLIENT),
            ),
            environment={SERVER_URL: Slot.SERVER, **_logging(config.log_format)},
            secrets=(CLIENT_TOKEN, *config.cluster.environment),
            resources=Resources(workers.cpus),
            restarts=MAX_RESTARTS,
            after=(SERVER_PROCESS,),
        )
        for number in range(workers.count)
    ]


def worker_arguments(config: RunConfig, *, elsewhere: bool = False) -> list[str]:
    """A worker's script, or its tasks with their arguments.

    `elsewhere` strips folders, for a machine with the files in its working directory. The server recognizes
    tasks without their folder.
    """
    if config.workers.script:
        return [Path(config.workers.script).name if elsewhere else config.workers.script]
    tasks = config.all_tasks
    with_arguments = not elsewhere or any(task.train_args or task.eval_args for task in tasks)
    words: list[str] = []
    for task in tasks:
        words += ["--task", _without_folder(task.name) if elsewhere else task.name]
        if with_arguments:  # The n-th arguments belong to the n-th task.
            words += ["--task-args", json.dumps(task.train_args), "--eval-args", json.dumps(task.eval_args)]
        if any(each.sandbox for each in tasks):
            names = [task.sandbox_type, Path(task.sandbox_config).name]
            words += ["--sandbox", ":".join(filter(None, names)) if elsewhere else task.sandbox]
    return words


def _without_folder(task: str) -> str:
    file, separator, name = task.rpartition(".py@")
    return f"{Path(file).name}{separator}{name}" if separator else task
