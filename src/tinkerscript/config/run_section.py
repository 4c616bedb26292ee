"""`RunConfig`: every setting of a run, in sections."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import (
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from tinkerscript.config.engine_section import EngineConfig
from tinkerscript.config.inference_section import RESERVED_ROLES, InferenceConfig, RoleConfig
from tinkerscript.config.section import Section
from tinkerscript.config.server_section import InterchangeConfig, Port
from tinkerscript.config.training_section import (
    DistillationConfig,
    SamplingConfig,
    SftConfig,
    TrainingConfig,
)
from tinkerscript.limits import TRANSCRIPT
from tinkerscript.logs import LogFormat
from tinkerscript.remote_folder import is_url, name_of

# `experiment_dir: auto` creates folders here.
RUNS = Path("runs")


class TaskConfig(Section):
    name: str = ""
    """An Inspect task (`file.py@name`, or a registered name such as `inspect_evals/gsm8k`), another
    environment (`KIND:NAME`, docs/environments.md), or your class (`file.py:NAME`)."""

    train_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select training samples."""

    eval_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select evaluation samples. If equal to `train_args`, the score is not held out."""

    sandbox_type: str = ""
    """Sandbox in place of the task's own: `docker`, `bubblewrap` (docs/agents.md), `local` (the model's code
    runs on the worker's machine, not isolated), or another of Inspect's."""

    sandbox_config: str = ""
    """The sandbox's config, such as a compose file."""

    @model_validator(mode="after")
    def _config_is_of_a_sandbox(self) -> TaskConfig:
        if self.sandbox_config and not self.sandbox_type:
            raise ValueError("sandbox_config: give sandbox_type too")
        return self

    @property
    def sandbox(self) -> str:
        """In Inspect's notation, such as `docker:compose.yaml`; may be empty."""
        return ":".join(filter(None, [self.sandbox_type, self.sandbox_config]))


class WeightedTaskConfig(TaskConfig):
    weight: float = Field(default=1.0, gt=0)
    """Relative share of the groups."""


class EvaluationConfig(Section):
    episodes: int = Field(default=1000, ge=0)
    """Episodes before and after training. 0: none."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations. 0: none during training."""

    interim_episodes: int = Field(default=200, ge=1)
    """Episodes of an evaluation during training."""

    attempts: int = Field(default=1, ge=1)
    """Episodes per sample. With k, the score is avg@k, with pass@k in the metrics
    (docs/training.md#pass-at-k)."""

    share: float = Field(default=0.05, gt=0, le=1)
    """Share of running and of all episodes that evaluations may take while steps train
    (docs/training.md#evaluation). The rest runs after the last step."""


class MetricsConfig(Section):
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Where metrics go besides `metrics.jsonl`. Each needs its extra (`pip install
    'tinkerscript[tensorboard]'`). TensorBoard's files are in the run folder."""

    project: str = "tinkerscript"
    """Project at W&B and Trackio; the run has its folder's name."""

    extra: list[str] = Field(default_factory=list[str])
    """Your functions for a step's metrics, as `module:name` or `file.py:name` (docs/extending.md)."""


class WorkersConfig(Section):
    count: int = Field(default=2, ge=0)
    """Worker processes to start. 0: you start them."""

    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a worker."""

    concurrency: int = Field(default=32, ge=1)
    """Episodes that a worker runs at once."""

    script: str = ""
    """Script with a `rollout(episode)` function, in place of the task's solver and scorers."""

    allow_discard_timeout: float = Field(default=60.0, gt=0)
    """Seconds without activity after which a worker loses its claim and the episode is requeued."""


class ClusterConfig(Section):
    launcher: Literal["local", "ray"] = "local"
    """`local`: processes start on this machine. `ray`: on a Ray cluster (docs/cluster.md, `pip install
    'tinkerscript[ray]'`)."""

    address: str = ""
    """Address of the cluster's head, such as `10.0.0.1:6379`; this machine must be a node. Empty: a local
    Ray, which ends with the run."""

    environment: list[str] = Field(default_factory=list[str])
    """Environment variables that Ray passes on, such as `HF_TOKEN`. Required tokens always pass."""


class RunConfig(Section):
    experiment_dir: str = "auto"
    """The run's folder. `auto`: a new one in `runs/`. With a URL, such as `s3://bucket/run_17`, the run works
    in `runs/run_17` and copies its results there (docs/cluster.md, `pip install 'tinkerscript[remote]'`)."""

    enable_tinkerscript_mode: bool = True
    """False: one process runs trainer, server and one worker."""

    method: Literal["grpo", "sft"] = "grpo"
    """`grpo`: reinforcement learning. `sft`: supervised training on chats."""

    seed: int = 1
    """Seed for the order of samples, sampling and training."""

    log_format: LogFormat = "text"
    """Format of the files in `logs` (docs/monitoring.md)."""

    page_port: Port | Literal["off"] = "auto"
    """Port of the run's page. `auto`: 10085, or if in use a free one. 0: a free one. `off`: no page. Other
    machines can reach it only with the admin token set."""

    recording: str = Field(default="all", pattern=r"^(all|off|every [1-9]\d{0,5})$")
    """What the ledger keeps beyond training's needs: transcripts, calls of failed attempts, and per-token
    values of `all` steps or every N-th (`every 10`). `off`: none."""

    recording_limit_mb: int = Field(default=20_480, ge=0)
    """Maximum MiB of calls, tokens and transcripts in the ledger. Beyond it, the oldest episodes that cannot
    train lose theirs. 0: no limit."""

    interchange_server: InterchangeConfig = Field(default_factory=InterchangeConfig)
    """The server that hands out episodes and answers model calls."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    """The task to train and evaluate on."""

    tasks: list[WeightedTaskConfig] = Field(default_factory=list[WeightedTaskConfig])
    """Several tasks in place of `task`, each with its keys and a weight."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The engine that trains, and by default also samples. The keys from `threads` to `routing_replay` are
    for the embedded engine."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """What samples replies to model calls."""

    roles: dict[str, RoleConfig] = Field(default_factory=dict[str, RoleConfig])
    """More models that an episode may call, by name (docs/roles.md)."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Defaults for model calls."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """Training with GRPO. `method: sft` uses its keys of optimizer, schedule and checkpoints."""

    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised training on chats, for `method: sft`."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation before, during and after training."""

    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Where metrics are sent."""

    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    """Workers that the run starts."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Where the run's processes start."""

    @field_validator("recording", "page_port", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false.

    @model_validator(mode="after")
    def _each_task_once(self) -> RunConfig:
        names = [task.name for task in self.tasks]
        if self.tasks and self.task.name:
            raise ValueError("give `task` or `tasks`, not both")
        if "" in names or len(set(names)) < len(names):
            raise ValueError(f"each of `tasks` needs a name of its own, got {names}")
        return self

    @model_validator(mode="after")
    def _teacher_is_a_role(self) -> RunConfig:
        distillation = self.training.distillation
        if not distillation.teacher:
            return self
        role = self.roles.get(distillation.teacher)
        if role is None or role.kind != "frozen":
            frozen = ", ".join(name for name, each in self.roles.items() if each.kind == "frozen")
            raise ValueError(
                f"training.distillation.teacher: {distillation.teacher!r} is not one of the roles of kind: "
                f"frozen, which are {frozen or 'none'}"
            )
        if distillation.top_k and (role.base_url or self.engine.backend != "embedded"):
            raise ValueError(
                f"training.distillation.top_k: {distillation.top_k} needs a teacher in the trainer, because "
                "other servers score only given tokens: use engine.backend: embedded and a role without "
                "base_url, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_samples(self) -> RunConfig:
        if self.training.curriculum.by != "none" and not self.all_tasks:
            raise ValueError(
                "training.curriculum chooses among the samples of a task: set task.name, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _means_are_of_samples(self) -> RunConfig:
        if self.training.advantage_baseline == "sample_mean" and not self.all_tasks:
            raise ValueError(
                "training.advantage_baseline: sample_mean is the mean of a task's sample: set task.name, or "
                "use running_mean"
            )
        return self

    @model_validator(mode="after")
    def _judge_is_a_role(self) -> RunConfig:
        name = self.training.judge.role
        role = self.episode_roles.get(name)
        if name and (role is None or role.kind == "trained"):
            others = [each for each, of in self.episode_roles.items() if of.kind != "trained"]
            raise ValueError(
                f"training.judge.role: {name!r} is not one of the roles of kind: outside or frozen that "
                f"episodes may call, which are {', '.join(others) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _samples_can_train(self) -> RunConfig:
        temperature = self.sampling.temperature
        if self.method != "grpo" or not self.training.steps or temperature == 1:
            return self
        if temperature == 0:
            raise ValueError(
                "sampling.temperature: 0 takes the most probable token, which leaves no distribution to "
                "train on; set it above 0"
            )
        teacher = self.training.distillation.teacher
        if self.engine.backend == "tinker":
            alone = "a Tinker service trains"
        elif teacher and self.roles[teacher].base_url:
            alone = f"the server of the teacher {teacher!r} scores"
        else:
            return self
        raise ValueError(
            f"sampling.temperature: {temperature:g}: {alone} only at temperature 1; set it to 1, and "
            "sampling.precedence: run if programs set another"
        )

    @model_validator(mode="after")
    def _roles_can_be_reached(self) -> RunConfig:
        for name in self.roles:
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name) or name in RESERVED_ROLES:
                raise ValueError(
                    f"roles.{name}: a role's name starts with a letter, has only lower-case letters, digits, "
                    f"- and _, and is not {' or '.join(RESERVED_ROLES)}"
                )
        return self

    @model_validator(mode="after")
    def _sampled_roles_have_a_trainer(self) -> RunConfig:
        for name, role in self.episode_roles.items():
            if role.kind == "outside":
                continue
            if self.inference.samples_without_trainer:
                raise ValueError(
                    f"roles.{name}: the trainer samples for a {role.kind} role, and inference.backend: "
                    f"{self.inference.backend} samples without it; use kind: outside"
                )
        return self

    @model_validator(mode="after")
    def _trained_roles_can_train(self) -> RunConfig:
        for name in self.trained_roles:
            if self.method != "grpo":
                raise ValueError(f"roles.{name}: kind: trained learns from episodes; set method: grpo")
            if self.engine.devices > 1:
                raise ValueError(
                    f"roles.{name}: kind: trained trains on one device, and engine.devices is "
                    f"{self.engine.devices}; set it to 1"
                )
        return self

    @model_validator(mode="after")
    def _replicas_hold_the_versions(self) -> RunConfig:
        inference = self.inference
        if inference.on_publish == "continue" and self.engine.backend != "embedded":
            raise ValueError(
                "inference.on_publish: continue needs engine.backend: embedded, because a Tinker service "
                "finishes a call with the weights it started with; leave on_publish: move"
            )
        if self.engine.routing_replay and inference.backend != "trainer":
            raise ValueError(
                f"engine.routing_replay: inference.backend: {inference.backend} does not report the experts "
                "that it chose; sample with the embedded engine (inference.backend: trainer), or leave it out"
            )
        if self.engine.quantization != "none" and inference.backend != "trainer":
            raise ValueError(
                f"engine.quantization: inference.backend: {inference.backend} would sample with the base in "
                "full precision, which is another policy; sample with the embedded engine "
                "(inference.backend: trainer), or leave it out"
            )
        if not inference.has_replicas:
            return self
        if self.engine.backend != "embedded":
            raise ValueError(
                "inference.launch and inference.replicas get the weights that engine.backend: embedded trains"
            )
        if not self.engine.lora.rank and inference.on_publish == "finish":
            raise ValueError(
                "inference.on_publish: finish needs several versions on a replica, so LoRA adapters: set "
                "engine.lora.rank, or leave on_publish: move"
            )
        if inference.sleep and self.engine.devices > 1:
            raise ValueError(
                f"inference.sleep: with engine.devices: {self.engine.devices}, only the first device would "
                "give up its memory before replicas wake; set it to false, or train on one device"
            )
        needed = self.live_versions + 1
        if self.engine.lora.rank and inference.max_loras < needed:
            raise ValueError(
                f"inference.max_loras: {inference.max_loras} is too few: on_publish: {inference.on_publish} "
                f"with training.max_policy_lag: {self.max_policy_lag} needs {needed}"
            )
        return self

    @model_validator(mode="after")
    def _launcher_places_them(self) -> RunConfig:
        gpus, is_ray = self.inference.launch.gpus, self.cluster.launcher == "ray"
        if is_ray and gpus and gpus != "any":
            raise ValueError(
                f"inference.launch.gpus: with cluster.launcher: ray, Ray chooses the GPUs: any, not {gpus}"
            )
        if not is_ray and gpus == "any":
            raise ValueError(
                "inference.launch.gpus: any is for cluster.launcher: ray; name them, such as [0, 1]"
            )
        if is_ray and self.engine.device.startswith("cuda:"):
            raise ValueError(
                f"engine.device: with cluster.launcher: ray, Ray chooses the GPUs: cuda, not "
                f"{self.engine.device!r}"
            )
        if is_ray and not (self.enable_tinkerscript_mode and self.method == "grpo"):
            raise ValueError(
                "cluster.launcher: ray is for runs of several processes; method: sft and "
                "enable_tinkerscript_mode: false have one"
            )
        if self.cluster.address and not is_ray:
            raise ValueError(f"cluster.address: {self.cluster.address!r} is for cluster.launcher: ray")
        return self

    @property
    def episode_roles(self) -> dict[str, RoleConfig]:
        """All roles but the teacher, which only scores."""
        teacher = self.training.distillation.teacher
        return {name: role for name, role in self.roles.items() if name != teacher}

    @property
    def key_variables(self) -> frozenset[str]:
        """Environment variables with secrets: keys of the roles' servers and tokens of clients."""
        keys = (role.api_key_env for role in self.roles.values())
        tokens = (client.token_env for client in self.interchange_server.clients)
        return frozenset(filter(None, (*keys, *tokens)))

    @property
    def trained_roles(self) -> dict[str, RoleConfig]:
        return {name: role for name, role in self.roles.items() if role.kind == "trained"}

    def training_of(self, role: str) -> TrainingConfig:
        """Settings of a trained role (empty: the main policy, which alone has a teacher)."""
        if not role:
            return self.training
        rate = self.roles[role].learning_rate or self.training.learning_rate
        alone = DistillationConfig()
        return self.training.model_copy(update={"learning_rate": rate, "distillation": alone})

    @property
    def no_images(self) -> dict[str, str]:
        """Why calls may have no images, by role (empty: the main policy). A role that is absent may."""
        found: dict[str, str] = {}
        for role in ("", *self.trained_roles):
            training = self.training_of(role)
            # The trainer could not compute these sequences, which would end the run.
            against = {
                f"engine.backend: {self.engine.backend}": self.engine.backend != "embedded",
                f"engine.devices: {self.engine.devices}": self.engine.devices > 1,
                f"inference.backend: {self.inference.backend}": self.inference.backend != "trainer",
                "training.kl_penalty_coef": training.kl_penalty_coef > 0,
                **{f"training.loss_config.{name}": True for name in training.kl_losses},
                "training.distillation": bool(training.distillation.teacher),
            }
            if reasons := [name for name, holds in against.items() if holds]:
                found[role] = f"this run takes only text, because {reasons[0]} does not work with images"
        return found

    @property
    def slots(self) -> int:
        """Most episodes that the run's own workers hold at once."""
        workers = self.workers
        return workers.concurrency * (
            workers.count if self.enable_tinkerscript_mode else min(workers.count, 1)
        )

    @property
    def live_versions(self) -> int:
        """Versions that replicas sample training episodes from at a time."""
        return 1 + (self.max_policy_lag if self.inference.on_publish == "finish" else 0)

    @property
    def held_versions(self) -> int:
        """Older versions that replicas can keep for evaluations."""
        return self.inference.max_loras - self.live_versions - 1 if self.engine.lora.rank else 0

    @property
    def max_policy_lag(self) -> int:
        """`training.max_policy_lag` with its default applied."""
        given = self.training.max_policy_lag
        return given if given is not None else int(not self.all_tasks)

    @property
    def replay_lag(self) -> int:
        """How many steps before a checkpoint episodes may start and still train after it."""
        return 1 + max(self.max_policy_lag, self.training.replay_uses - 1)

    @property
    def max_transcript_bytes(self) -> int:
        """Compressed, per attempt. 0: transcripts are not recorded."""
        return 0 if self.recording == "off" else TRANSCRIPT.limit

    @property
    def all_tasks(self) -> list[WeightedTaskConfig]:
        if self.tasks or not self.task.name:
            return list(self.tasks)
        return [WeightedTaskConfig(**self.task.model_dump())]

    def new_folder(self, now: datetime) -> Path:
        """`auto` gets an unused folder in `runs/`, and a URL the one of its name."""
        if is_url(self.experiment_dir):
            return RUNS / name_of(self.experiment_dir)
        if self.experiment_dir != "auto":
            return Path(self.experiment_dir).expanduser()
        stem = now.strftime("%Y-%m-%d_%H-%M-%S")
        names = (stem if i == 0 else f"{stem}.{i}" for i in range(1000))
        return next(RUNS / name for name in names if not (RUNS / name).exists())
