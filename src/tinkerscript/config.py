"""The run's configuration: YAML read into pydantic models that refuse unknown keys.

Every key is documented under its field, and `docs/config.md` is generated from these
docstrings (`tests/unit/test_config.py` holds the two together).
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from tinkerscript.errors import ConfigError
from tinkerscript.files import load_yaml

TINY_MODEL = Path(__file__).parent / "engine" / "tiny"


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _http_url(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError("it must be a URL such as http://127.0.0.1:8000")
    return value


class InterchangeConfig(Section):
    interchange_method: Literal["ipc", "tcp"] = "ipc"
    """Transport of the ZeroMQ link between trainer and server."""

    interchange_server_host: str = "127.0.0.1"
    """Address that the HTTP server binds. Any address but a loopback one needs a client token."""

    interchange_server_port: int = Field(default=10086, ge=0, le=65535)
    """HTTP port. 0 takes a free one, which the run folder's `server.json` names."""

    link_host: str = "127.0.0.1"
    """IP address that the link binds when `interchange_method` is `tcp`. On any but a loopback address it is
    encrypted, and only who holds the run folder's `link_keys` can connect."""

    link_encryption: Literal["auto", "always"] = "auto"
    """`auto`: keys for a link over tcp beyond a loopback address; `always`: for every link over tcp."""

    link_port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the link when `interchange_method` is `tcp`. 0 takes a free one."""

    public_base_url: str = ""
    """URL by which clients reach the server, if it differs from host and port (a proxy, another host)."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Claims that an episode may use up before it is recorded as failed."""

    call_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that one model call may wait for the engine."""

    max_claim_s: float = Field(default=7200.0, gt=0)
    """Seconds after which a claim is over, however often its client renews it."""

    store: str = "sqlite"
    """Where episodes are stored: `sqlite` (in the run's folder), `sqlite:///PATH`, or `module:name` of a
    function that opens a store of your own."""

    durability: Literal["normal", "full"] = "normal"
    """What a commit survives: `normal` a killed process, `full` a power cut too (a disk sync for each)."""

    max_body_bytes: int = Field(default=16_777_216, ge=1024)
    """Bytes of a request's body at most."""

    max_metadata_bytes: int = Field(default=1_048_576, ge=1024)
    """Bytes of a result's `workflow_output`, as JSON, at most."""

    max_calls_per_claim: int = Field(default=10_000, ge=1)
    """Model calls of one claim at most."""

    max_tokens_per_claim: int = Field(default=4_000_000, ge=1)
    """Tokens that one claim may sample at most."""

    max_claims_per_client: int = Field(default=4096, ge=1)
    """Claims that one client may hold at once."""

    max_pool_episodes: int = Field(default=20_000, ge=1)
    """Episodes, not yet over, that a client's own pool may hold."""


class TaskConfig(Section):
    name: str = ""
    """The Inspect task that trains: `file.py@name`, or a registered name such as `inspect_evals/gsm8k`."""

    train_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select the samples that train."""

    eval_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select the samples that are scored. Those that `train_args` select too are
    trained on: give another split."""


class WeightedTaskConfig(TaskConfig):
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that are of this task, in proportion to the others' weights."""


class EngineConfig(Section):
    backend: Literal["embedded", "tinker"] = "embedded"
    """Who trains and samples: the `embedded` engine in the trainer's process, or a service that speaks
    `tinker`'s protocol: the Tinker service, a server of `tinkerscript engine --port`, or another. The API key
    is read from the environment variable TINKER_API_KEY alone."""

    model: str = "tiny"
    """`tiny` (ships with the package) or the folder of a Hugging Face causal language model. With `tinker`,
    the folder of that model's tokenizer, chat format and config.json; weights are not needed."""

    checkpoint: str = ""
    """Weights to begin with, instead of the model's own: the folder of a checkpoint of an earlier run with
    the same backend (`runs/.../checkpoints/final`), or with `tinker` a `tinker://` path. The optimizer starts
    anew."""

    base_url: str = ""
    """With `tinker`: URL of the service. Empty: TINKER_BASE_URL, or the Tinker service."""

    service_model: str = ""
    """With `tinker`: the model's name there. Empty: the only one that it has."""

    lora_rank: int = Field(default=32, ge=1)
    """With `tinker`: rank of the LoRA that the service trains. `tinkerscript engine` trains all weights and
    does not use it."""

    threads: int = Field(default=1, ge=1)
    """Torch threads of the embedded engine. One is fastest for tiny models."""

    max_batch: int = Field(default=128, ge=1)
    """Sequences that are decoded together at most."""

    device: str = "cpu"
    """Torch device of the embedded engine: `cpu`, `cuda`, `cuda:1`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Number format of the embedded engine's matrix products. `auto`: bfloat16 where the device has it in
    hardware. In bfloat16 the sampler's log probabilities are not exactly the trainer's (docs/engine.md)."""

    renderer: str = "qwen3_instruct"
    """The chat format of supervised chats and of episodes in the trainer's process, by the name of
    tinker_cookbook's renderer. It must be the model's own. A server renders by the model's template."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return _http_url(value)


class InferenceConfig(Section):
    backend: Literal["trainer", "vllm", "sglang"] = "trainer"
    """Who samples: the `trainer`'s engine, or a server of the user's (docs/samplers.md). The latter is for
    `tinkerscript serve`; `engine.model` then is the folder of the served model's tokenizer and config."""

    base_url: str = ""
    """URL of the vLLM or SGLang server, such as `http://127.0.0.1:8000`; with or without `/v1`."""

    model: str = ""
    """Name of the model there. Empty: the only one that it serves."""

    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key. Empty: it needs none."""

    policy_version: int = Field(default=-1, ge=-1)
    """Policy version of the weights that the server holds. -1: weights that the trainer never published; what
    they sample is recorded and does not train. A server that names its weights by numbers says it itself."""

    max_in_flight: int = Field(default=256, ge=1)
    """Requests to the server at once; further ones wait."""

    start_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds to wait for the server to answer at the start."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return _http_url(value)


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of the policy when a program asks for none."""

    max_tokens: int = Field(default=64, ge=1)
    """Most tokens of one model call when a program asks for no limit."""


class TrainingConfig(Section):
    steps: int = Field(default=100, ge=0)
    """Training steps, each one batch of groups and one new policy version."""

    groups_per_step: int = Field(default=32, ge=1)
    """Samples of one step."""

    group_size: int = Field(default=8, ge=2)
    """Episodes of each sample."""

    batch_rule: Literal["groups", "differing_groups", "episodes"] = "groups"
    """When a step has enough: `groups` that are complete, complete groups whose rewards differ
    (`differing_groups`: uniform ones are replaced), or accepted `episodes` of whatever groups."""

    extra_groups: int = Field(default=0, ge=0)
    """Groups that a step registers beyond those it needs, so that stragglers do not hold it up. What is not
    needed in the end is cancelled."""

    max_groups_per_step: int = Field(default=0, ge=0)
    """Groups that `differing_groups` registers for one step at most; 0: four times `groups_per_step`."""

    asynchronous: bool = False
    """True: the episodes of the next step are sampled while the current one trains."""

    max_policy_lag: int = Field(default=1, ge=0)
    """Training steps by which an episode may be older than the weights that it trains; older ones are counted
    and left out."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between two checkpoints from which `train --resume` goes on; 0: none but the last."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints that are kept, beside the final one."""

    inspect_log_every: int = Field(default=0, ge=0)
    """Steps between two whose episodes are written as Inspect logs to `inspect/` in the run's folder, where
    `inspect view --log-dir` shows them; 0: none."""

    on_misalignment: Literal["stop", "warn"] = "stop"
    """When what the sampler reported is not what the trainer computes, at policy lag 0: `stop` before the
    weights change (the run can be resumed), or `warn` and leave out the sequences known to be wrong."""

    max_mean_dlogp: float = Field(default=0.1, gt=0)
    """Mean difference between the trainer's log probabilities and the sampler's, at policy lag 0, above which
    a step is misaligned."""

    warn_mean_dlogp: float = Field(default=0.05, gt=0)
    """The same, above which a warning is counted."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps that one pass over a batch is split into."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over one batch, each shuffled anew and split into `minibatches`."""

    microbatch_size: int = Field(default=0, ge=0)
    """Sequences of one `forward_backward` call; the gradients of a minibatch's calls add up, so it changes
    no result. 0: the whole minibatch in one call. The embedded engine splits by tokens in any case."""

    advantage_baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is taken off an episode's reward: the mean of its group, or the mean of the group's others."""

    advantage_scale: Literal["none", "group_deviation"] = "none"
    """What the difference is divided by: nothing, or the standard deviation of the group's rewards."""

    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the start policy, taken off the reward of each token. 0: none."""

    kl_discount_factor: float = Field(default=0.0, ge=0, le=1)
    """Discount with which a token also answers for the divergence of the tokens after it. 0: only its own."""

    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = "ppo"
    """Policy-gradient loss, as Tinker names them."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Ratio clip below one: the lower threshold is 1 - clip_low; 1 turns it off. Used by ppo and cispo."""

    clip_high: float = Field(default=0.2, ge=0)
    """Ratio clip above one: the upper threshold is 1 + clip_high. Used by ppo and cispo."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW learning rate after the warm-up."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls towards zero over the steps after the warm-up."""

    lr_floor: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate below which the schedule does not go."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps before the full learning rate is reached: step n of them has n / (warmup_steps + 1) of it."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW first moment decay."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW second moment decay."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""

    grad_clip_norm: float = Field(default=0.3, ge=0)
    """Gradient norm above which gradients are scaled down; 0 turns it off."""


class SftConfig(Section):
    data: str = ""
    """JSONL file of chats: a line is an object with `messages`, each with `role` and `content`, as OpenAI has
    them; `tool_calls`, `tool_call_id`, `name` and `trainable` may be there too."""

    held_out: int = Field(default=32, ge=0)
    """Chats that the seed takes out of the data: they never train, and their nll is measured."""

    batch_size: int = Field(default=32, ge=1)
    """Chats of one step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the data, each in an order of its own."""

    train_on_what: Literal[
        "last_assistant_message",
        "last_assistant_turn",
        "all_assistant_messages",
        "all_messages",
        "all_tokens",
        "all_user_and_system_messages",
        "customized",
    ] = "all_assistant_messages"
    """Which tokens train, by tinker_cookbook's names. `customized`: those of `trainable` messages."""

    max_tokens: int = Field(default=0, ge=0)
    """Longer chats are left out and counted, never cut. 0: the model's context length."""


class EvaluationConfig(Section):
    episodes: int = Field(default=1000, ge=0)
    """Episodes of the evaluations before and after training. 0 turns evaluation off."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations during training; 0 for none."""

    interim_episodes: int = Field(default=200, ge=1)
    """Episodes of each evaluation during training."""


class MetricsConfig(Section):
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Where a run's metrics go beside `metrics.jsonl`. Each needs its package: `pip install
    'tinkerscript[tensorboard]'`, and so on. TensorBoard's files are in the run's folder."""

    project: str = "tinkerscript"
    """Project at W&B and Trackio. A run has the name of its folder there."""


class WorkersConfig(Section):
    count: int = Field(default=2, ge=0)
    """Local worker processes that `tinkerscript train` starts. 0: remote workers only."""

    concurrency: int = Field(default=32, ge=1)
    """Episodes that one worker runs at once."""

    script: str = ""
    """A script with a `rollout(episode)` function. Empty: the task's own solver and scorers."""

    allow_discard_timeout: float = Field(default=60.0, gt=0)
    """Seconds without activity after which a worker's claim lapses."""

    max_restarts: int = Field(default=10, ge=0)
    """Times that a dead local worker or server is started again before the run gives up."""


class RunConfig(Section):
    """The whole configuration of one run."""

    experiment_dir: str = "auto"
    """Folder of the run. `auto` makes a new one under `runs/`."""

    enable_tinkerscript_mode: bool = True
    """True: server, workers and HTTP. False: the task runs inside the trainer's process."""

    method: Literal["grpo", "sft"] = "grpo"
    """How the model learns: by reinforcement (`grpo`), or from written chats (`sft`), as a warm start."""

    seed: int = 1
    """Seed of the order of samples, of sampling and of training."""

    interchange_server: InterchangeConfig = Field(default_factory=InterchangeConfig)
    """The interchange server."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    """What is learned and what is evaluated."""

    tasks: list[WeightedTaskConfig] = Field(default_factory=list[WeightedTaskConfig])
    """In place of `task`, several in one run, each with a weight. A name may be there once."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The engine that samples and trains."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """Where model calls are sampled."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Defaults of model calls."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """GRPO; of it, `sft` uses the optimizer's settings, the schedule and the checkpoints."""

    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised training on chats, for `method: sft`."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation before, during and after training."""

    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Where metrics go."""

    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    """Local workers."""

    @model_validator(mode="after")
    def _each_task_once(self) -> RunConfig:
        names = [task.name for task in self.tasks]
        if self.tasks and self.task.name:
            raise ValueError("give `task` or `tasks`, not both")
        if "" in names or len(set(names)) < len(names):
            raise ValueError(f"each of `tasks` needs a name of its own, got {names}")
        return self

    @property
    def all_tasks(self) -> list[WeightedTaskConfig]:
        """The tasks of the run with their weights; empty where clients register their own samples."""
        if self.tasks or not self.task.name:
            return list(self.tasks)
        return [WeightedTaskConfig(**self.task.model_dump())]


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `key.sub=value` overrides, and check every key.

    Raises ConfigError that names the file, the key and what is allowed there.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror or error}") from error
    return parse_config(text, source=str(path), overrides=overrides)


def parse_config(text: str, *, source: str, overrides: list[str] | None = None) -> RunConfig:
    """Check YAML text against the models. Parses safely: tags that would run code are refused."""
    data = load_yaml(text, source=source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of config keys, not {type(data).__name__}")
    for override in overrides or []:
        _apply_override(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    *parents, last = key.split(".")
    section = data
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a section")
    section[last] = load_yaml(value, source=f"override {override!r}")


def _explain(error: ValidationError, source: str) -> str:
    lines = [
        _explain_one(item["loc"], item["type"], item["msg"], item.get("input")) for item in error.errors()
    ]
    return f"{source}: " + "; ".join(lines)


def _explain_one(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in loc)
    if not loc:
        return message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        section = ".".join(str(part) for part in loc[:-1])
        where = f"the section {section!r}" if section else "the top level"
        return f"unknown key {key!r}; {where} knows {', '.join(_known_keys(loc[:-1]))}"
    if kind == "missing":
        return f"the key {key!r} is required"
    return f"{key}: {message.removeprefix('Value error, ').lower()}, got {value!r}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        annotation = get_args(annotation)[0] if get_origin(annotation) is list else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def model_folder(model: str) -> Path:
    """The folder of the model and its tokenizer; `tiny` is the one that ships with the package.

    Raises ConfigError for a folder without `config.json` and `tokenizer.json`.
    """
    folder = TINY_MODEL if model == "tiny" else Path(model).expanduser()
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"engine.model: {model!r} has no {name}; "
                "give 'tiny' or the folder of a Hugging Face causal model"
            )
    return folder


def context_of(folder: Path) -> int:
    """Tokens of prompt and answer together that the model in `folder` takes, by its config.json.

    Raises ConfigError for a config.json that cannot be read or does not say.
    """
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    text = config.get("text_config") if isinstance(config, dict) else None
    source: Any = text if isinstance(text, dict) else config
    limit: Any = source.get("max_position_embeddings") if isinstance(source, dict) else None
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"{path} has no max_position_embeddings, the context length")
    return limit


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML, every key written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def import_name(text: str, *, what: str) -> object:
    """The object that `module:name` names. Raises ConfigError, which begins with `what`."""
    module, separator, name = text.partition(":")
    if not separator or not module or not name:
        raise ConfigError(f"{what}: {text!r} is not of the form module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what}: {text!r} cannot be imported: {error}; is the module on PYTHONPATH?"
        ) from error
