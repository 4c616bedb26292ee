"""The run's configuration: YAML read into pydantic models that refuse unknown keys.

Every key is documented here, under its field; `scripts/write_config_docs.py` generates the docs page from
these docstrings. `import_name` resolves the names of user code that a config may hold.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

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

from tinkerscript.errors import MAX_REWARD, ConfigError
from tinkerscript.files import load_yaml
from tinkerscript.logs import LogFormat
from tinkerscript.remote_folder import is_url, name_of

__all__ = [
    "ClientConfig",
    "ClusterConfig",
    "DistillationConfig",
    "EngineConfig",
    "EvaluationConfig",
    "InferenceConfig",
    "InterchangeConfig",
    "LaunchConfig",
    "LoraConfig",
    "MetricsConfig",
    "ReplayConfig",
    "RoleConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "TaskConfig",
    "TrainingConfig",
    "WeightedTaskConfig",
    "WorkersConfig",
    "dump_config",
    "import_name",
    "load_config",
    "parse_config",
]


RUNS = Path("runs")
"""Where `experiment_dir: auto` makes its folders."""


class Section(BaseModel):
    """Base of every section: refuses unknown keys, immutable after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _http_url(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError("it must be a URL such as http://127.0.0.1:8000")
    return value


class ClientConfig(Section):
    name: str = Field(min_length=1, max_length=100, pattern="^[^/]+$")
    """Name of the client in refusals and metrics, and of its own pool."""

    token_env: str = Field(min_length=1)
    """Name of the environment variable that holds the client's token. The same with `_FILE` appended may
    name a file that holds it."""

    max_claims: int = Field(default=256, ge=1)
    """Maximum number of claims that it may hold at once."""

    pools: list[str] = Field(default_factory=list[str])
    """Pools that it may claim from and register into; an empty name is the trainer's. An empty list: the
    trainer's, and its own."""

    registrations_per_minute: int = Field(default=6000, ge=1)
    """Maximum number of episodes that it may register in a minute."""

    bytes_per_minute: int = Field(default=268_435_456, ge=1024)
    """Maximum size of the bodies of its requests in a minute, model calls excepted."""


class InterchangeConfig(Section):
    interchange_method: Literal["ipc", "tcp"] = "ipc"
    """Transport of the ZeroMQ link between trainer and server."""

    interchange_server_host: str = "127.0.0.1"
    """Address that the HTTP server binds. Any address other than loopback needs both tokens, and so does a
    server behind `trusted_proxies` or with another machine's name in `public_base_url`."""

    interchange_server_port: int = Field(default=10086, ge=0, le=65535)
    """HTTP port. 0 picks a free port, which the run folder's `server.json` names."""

    link_host: str = "127.0.0.1"
    """IP address that the link binds if `interchange_method` is `tcp`. On any address other than loopback
    the link is encrypted, and connecting takes the run folder's `link_keys`."""

    link_encryption: Literal["auto", "always"] = "auto"
    """`auto`: encrypt a `tcp` link beyond loopback; `always`: encrypt every `tcp` link."""

    link_port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the link if `interchange_method` is `tcp`. 0 picks a free port."""

    link_addresses: list[str] = Field(default_factory=list[str])
    """Links of all servers that share the store (`tcp://HOST:PORT`). With them the trainer starts no server:
    it follows the one that serves, and its workers use `public_base_url` (docs/failover.md)."""

    public_base_url: str = ""
    """URL at which clients reach the server, if it differs from host and port (for example behind a
    proxy)."""

    trusted_proxies: list[str] = Field(default_factory=list[str])
    """Addresses of proxies whose `X-Forwarded-Proto` and `X-Forwarded-For` are believed."""

    tls_certificate: str = ""
    """PEM file of a certificate, with its chain, to serve HTTPS. Empty: HTTP."""

    tls_key: str = ""
    """PEM file of the certificate's private key. Empty: it is in `tls_certificate`."""

    clients: list[ClientConfig] = Field(default_factory=list[ClientConfig])
    """Clients with tokens and limits of their own, besides the shared token."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Number of claims after which an episode is recorded as failed."""

    quarantine_s: float = Field(default=600.0, ge=0)
    """Seconds for which a client gets no episodes after its attempts only fail while those of others succeed:
    8 in a row or more, less likely than one in a million at the others' rate. 0: never."""

    call_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a model call may wait for the engine."""

    max_claim_s: float = Field(default=7200.0, gt=0)
    """Maximum lifetime of a claim in seconds, however often its client renews it."""

    processes: int = Field(default=1, ge=1, le=64)
    """Processes that answer model calls. With more than one, each owns a share of the claims, at a path in
    their base URLs (`/g/2/v1`), and the server itself keeps the episodes (docs/cluster.md). Linux only."""

    store: str = "sqlite"
    """Where episodes are stored: `sqlite` (in the run's folder), `sqlite:///PATH`,
    `postgresql://USER@HOST/DATABASE` (docs/failover.md), or `module:name` of a function that opens a store of
    your own."""

    durability: Literal["normal", "full"] = "normal"
    """What a commit survives: `normal`, a killed process; `full`, also a power failure (one disk sync per
    commit). With PostgreSQL that is up to the database, and `full` refuses one with `fsync` off."""

    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds within which the head of a request has to arrive."""

    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds within which the body of a request has to arrive."""

    max_connections: int = Field(default=0, ge=0)
    """Open connections beyond which the one that has been idle longest is closed. 0: what the limit on open
    files allows."""

    max_body_bytes: int = Field(default=16_777_216, ge=1024)
    """Maximum size of a request body, in bytes."""

    max_metadata_bytes: int = Field(default=1_048_576, ge=1024)
    """Maximum size of a result's `workflow_output` as JSON, in bytes."""

    max_reward: float = Field(default=MAX_REWARD, gt=0, le=MAX_REWARD)
    """Maximum magnitude of a reward. With clients that you do not trust, set it to what the task's scorer can
    give: one huge reward decides the direction of a whole step."""

    max_calls_per_claim: int = Field(default=10_000, ge=1)
    """Maximum number of model calls per claim."""

    max_tokens_per_claim: int = Field(default=4_000_000, ge=1)
    """Maximum number of tokens sampled per claim."""

    max_claims_per_client: int = Field(default=4096, ge=1)
    """Maximum number of claims that one client may hold at once."""

    max_groups_ahead: int = Field(default=0, ge=0)
    """Complete groups of a client's own pool that may wait for a later batch; a pool with as many gets no
    claims of training episodes until a batch takes some. 0: as many as a batch needs."""

    model_names: list[str] = Field(default_factory=list[str])
    """Names by which programs may call the model, besides `policy` and its own. Empty: any name."""

    max_pool_episodes: int = Field(default=20_000, ge=1)
    """Maximum number of unfinished episodes in a client's own pool."""

    @model_validator(mode="after")
    def _each_client_once(self) -> InterchangeConfig:
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError(f"each of `clients` needs a name of its own, got {names}")
        if self.link_addresses and not self.public_base_url:
            raise ValueError("link_addresses needs the servers' common address, public_base_url")
        if self.tls_key and not self.tls_certificate:
            raise ValueError("tls_key needs a tls_certificate")
        if self.tls_certificate and self.processes > 1:
            raise ValueError(
                "with several processes TLS ends at a proxy in front of the server (trusted_proxies): leave "
                "tls_certificate out, or set processes to 1"
            )
        if self.processes > 1 and not hasattr(os, "memfd_create"):
            raise ValueError("processes: more than one needs Linux; set it to 1")
        return self


class TaskConfig(Section):
    name: str = ""
    """The task to train on: an Inspect task (`file.py@name`, or a registered name such as
    `inspect_evals/gsm8k`), an environment of another kind (`KIND:NAME`; docs/environments.md), or a class of
    your own (`file.py:NAME`)."""

    train_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select the training samples."""

    eval_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Task arguments that select the evaluation samples. Samples that `train_args` also select are
    trained on: use a different split."""


class WeightedTaskConfig(TaskConfig):
    weight: float = Field(default=1.0, gt=0)
    """The task's share of the groups, relative to the weights of the other tasks."""


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapter. 0: the embedded engine trains all weights, and a service gets 32."""

    alpha: float = Field(default=32.0, gt=0)
    """What the adapter adds is scaled by `alpha` / `rank`. A service of Tinker's protocol has 32."""

    targets: list[str] = Field(default_factory=lambda: ["attn", "mlp", "unembed"], min_length=1)
    """What has adapters: `attn`, `mlp`, `unembed` (the head), or with the embedded engine linear modules by
    their last names, such as `q_proj`."""

    seed: int = Field(default=-1, ge=-1)
    """Seed of the adapter's first weights. -1: the run's."""


class EngineConfig(Section):
    backend: str = "embedded"
    """What trains and samples: `embedded`, the engine in the trainer's process, or `tinker`, a service that
    speaks Tinker's protocol (the Tinker service, `tinkerscript engine --port`, or another). The API key is
    read only from the environment variable TINKER_API_KEY."""

    model: str = "tiny"
    """`tiny` (ships with the package), the folder of a Hugging Face causal language model, or the id of one
    in the Hugging Face Hub (`Qwen/Qwen3-8B`, or `Qwen/Qwen3-8B@REVISION`). A folder comes before a model of
    the same name in the hub. With `tinker`, only tokenizer, chat format, and config.json are needed."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Train a LoRA adapter over the model, which is frozen, instead of all weights."""

    checkpoint: str = ""
    """Weights to start from instead of the model's own: a checkpoint folder of an earlier run with the
    same backend (`runs/.../checkpoints/final`), or with `tinker` a `tinker://` path. The optimizer starts
    fresh."""

    base_url: str = ""
    """With `tinker`: URL of the service. Empty: TINKER_BASE_URL, or the hosted Tinker service."""

    service_model: str = ""
    """With `tinker`: the model's name at the service. Empty: its only model."""

    threads: int = Field(default=1, ge=1)
    """Torch threads of the embedded engine. One is fastest for tiny models."""

    max_batch: int = Field(default=128, ge=1)
    """Maximum number of sequences decoded together."""

    device: str = "cpu"
    """Torch device of the embedded engine: `cpu`, `cuda`, `cuda:1`."""

    devices: int = Field(default=1, ge=1)
    """Devices that the embedded engine trains on (docs/devices.md). With `device: cuda`, each has a GPU; on
    `cpu`, each is a process."""

    sharding: Literal["replicate", "shard"] = "replicate"
    """With several devices: `replicate`, each holds all weights; `shard`, each holds a part (FSDP2), and the
    first one all of them too, to sample."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the embedded engine's matrix products. `auto`: bfloat16 if the hardware supports it.
    In bfloat16 the sampler's logprobs do not exactly match the trainer's (docs/models.md)."""

    activation_checkpointing: bool = False
    """With the embedded engine: hold the activations of one layer at a time and compute them again in the
    backward pass. Training takes about a third longer, and far less memory (docs/models.md)."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the model's chat template, such as `{enable_thinking: false}`. They hold for every episode
    and chat of a run."""

    renderer: str = ""
    """Name of a renderer of tinker_cookbook for supervised chats (`method: sft`) and for episodes in the
    trainer's process (`enable_tinkerscript_mode: false`). Empty: the model's own chat format, in which the
    server always renders. One that writes other prompts than the model's own format is refused."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return _http_url(value)

    @model_validator(mode="after")
    def _devices_are_shared_out(self) -> EngineConfig:
        if self.devices > 1 and self.backend == "tinker":
            raise ValueError(
                f"devices: {self.devices} devices are for the embedded engine; a service of Tinker's "
                "protocol has its own"
            )
        if self.devices > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device: {self.device!r} cannot be shared out over devices: {self.devices}; use cpu, or "
                "cuda for one GPU each"
            )
        return self


class LaunchConfig(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    replicas: int = Field(default=0, ge=0)
    """Number of replicas that `tinkerscript train` starts on this machine."""

    gpus: list[int] | Literal["any"] = Field(default_factory=list[int])
    """GPUs of the replicas; each takes the next `tensor_parallel` of them. `any`: Ray chooses them
    (`cluster.launcher: ray`). Empty: none, for vLLM's CPU build."""

    cpus: float = Field(default=1.0, ge=0)
    """Processors that Ray reserves for a replica."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs of one replica."""

    python: str = ""
    """Python of the environment that has vLLM or SGLang, such as `vllm-env/bin/python`; vLLM's needs
    tinkerscript too (`pip install tinkerscript`). Empty: this one."""

    args: list[str] = Field(default_factory=list[str])
    """Further arguments of the server, such as vLLM's `--gpu-memory-utilization=0.5`."""

    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Further environment variables of the replicas."""

    max_restarts: int = Field(default=10, ge=0)
    """Number of times that a dead replica is started again before the run gives up."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a replica may take to load the model."""


class InferenceConfig(Section):
    backend: Literal["trainer", "vllm", "sglang"] = "trainer"
    """What samples: the `trainer`'s engine; vLLM or SGLang replicas that get each version of the LoRA adapter
    that trains (`launch` or `replicas`, docs/vllm.md); or for `tinkerscript serve` your own server
    (`base_url`, docs/samplers.md), whose tokenizer and config are in the folder `engine.model`."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """Replicas to start."""

    replicas: list[str] = Field(default_factory=list[str])
    """URLs of running replicas to train with."""

    on_publish: Literal["move", "finish"] = "move"
    """What an episode's next model call samples from when weights were published since its last one: `move`,
    the newest; `finish`, those that it began with, as long as they may train (`training.max_policy_lag`)."""

    sleep: bool = False
    """Whether replicas give up their GPUs' memory while the trainer trains, to share a GPU with it (vLLM's
    sleep mode, in a server in development mode). Model calls wait meanwhile."""

    max_loras: int = Field(default=4, ge=2)
    """Adapters that a replica holds at once: the newest, those that episodes finish with, and a free one."""

    seeds: bool = False
    """Whether replicas get a seed for each request, which makes them slower."""

    prove_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds in which a replica has to load a version and prove it, or it samples no more."""

    hang_s: float = Field(default=60.0, gt=0)
    """Seconds without a sampled token after which a replica with requests counts as hung."""

    base_url: str = ""
    """URL of the vLLM or SGLang server, such as `http://127.0.0.1:8000`, with or without `/v1`."""

    model: str = ""
    """Name of the model at that server. Empty: the only one that it serves."""

    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key. Empty: the server needs none."""

    policy_version: int = Field(default=-1, ge=-1)
    """Policy version of the weights that the server holds. -1: weights that the trainer never published;
    their samples are recorded and do not train. A server that numbers its weights overrides this."""

    max_in_flight: int = Field(default=256, ge=1)
    """Maximum number of concurrent requests to the server; further ones wait."""

    start_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds to wait for a server or a replica that runs already to respond at the start."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return _http_url(value)

    @field_validator("replicas")
    @classmethod
    def _are_http(cls, value: list[str]) -> list[str]:
        return [_http_url(each) for each in value]

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> InferenceConfig:
        if not self.has_replicas:
            return self
        if self.backend == "trainer":
            raise ValueError("launch and replicas are for backend: vllm or sglang, not trainer")
        if self.base_url:
            raise ValueError("give base_url, for `tinkerscript serve`, or launch or replicas, to train with")
        wanted = self.launch.replicas * self.launch.tensor_parallel
        gpus = self.launch.gpus
        if gpus and gpus != "any" and len(gpus) < wanted:
            raise ValueError(
                f"launch.gpus names {len(gpus)} GPUs; {self.launch.replicas} replicas with "
                f"tensor_parallel: {self.launch.tensor_parallel} need {wanted}"
            )
        return self

    @property
    def has_replicas(self) -> bool:
        """Whether the weights that train are published to replicas."""
        return bool(self.launch.replicas or self.replicas)

    @property
    def server_name(self) -> str:
        """What the replicas run, for people."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.backend]

    @property
    def samples_without_trainer(self) -> bool:
        """Whether the interchange server samples by itself, from a server whose weights do not train."""
        return self.backend != "trainer" and not self.has_replicas


RESERVED_ROLES = ("policy", "side")
"""Names by which requests reach the policy."""


class RoleConfig(Section):
    kind: Literal["frozen", "outside"]
    """`frozen`: a model whose weights never change, beside the one that trains. `outside`: an
    OpenAI-compatible server, such as a judge; only the interchange server knows its key. Neither trains."""

    model: str = ""
    """For `frozen`: folder or Hub id of a model, or a checkpoint of a run; with `engine.backend: tinker` also
    a `tinker://` path or a base model of the service; empty: the weights that the run starts from. With
    `base_url`: the model's name at that server; empty: the only one that it serves."""

    base_url: str = ""
    """URL of a server, with or without `/v1`. `outside` needs one. For `frozen`: that of a vLLM server, whose
    model has the tokenizer of the one that trains; empty: the run's engine holds the model."""

    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key. Empty: it needs none."""

    max_tokens: int = Field(default=4096, ge=1)
    """For `outside`: tokens of a reply if the program does not set a maximum."""

    max_in_flight: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests to the server; further ones wait."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one request to the server may take."""

    max_wait_s: float = Field(default=600.0, ge=0)
    """For `frozen`: seconds that a training step waits for a server that does not answer, before the run ends
    and can be resumed."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return _http_url(value)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> RoleConfig:
        if self.kind == "outside" and not self.base_url:
            raise ValueError("kind: outside needs base_url, the URL of an OpenAI-compatible server")
        if self.api_key_env and not self.base_url:
            raise ValueError("api_key_env is the key of a server: give base_url")
        if "@" in self.base_url.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url has a password in it; give the key in the variable of api_key_env")
        return self


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """Temperature if the program does not set one."""

    max_tokens: int = Field(default=64, ge=1)
    """Maximum number of tokens per model call if the program does not set a limit."""


class ReplayConfig(Section):
    uses: int = Field(default=1, ge=1)
    """Training steps that an episode may train in. 1: no replay. At most `max_policy_lag` + 1."""

    groups: int = Field(default=0, ge=0)
    """Groups of earlier steps that join each step; 0: as many as the step's own `groups_per_step`."""

    capacity: int = Field(default=256, ge=1)
    """Groups that are kept for later steps; the oldest leave first."""

    recency: float = Field(default=3.0, ge=0)
    """How much newer groups are preferred: the n-th oldest of those kept has the weight n to this power. 0:
    all are equal."""

    max_age_s: float = Field(default=3600.0, gt=0)
    """Seconds after its first step for which a group may train again."""


class RolloutCorrectionConfig(Section):
    method: Literal["none", "truncate", "mask"] = "none"
    """What to do where the sampler's probabilities are not the trainer's: `none`; weigh by their ratio,
    truncated at `cap` (`truncate`), or left out of training above `cap` (`mask`)."""

    level: Literal["token", "sequence"] = "token"
    """Whose ratio: each token's own, or the product over the trained tokens of a sequence."""

    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class DistillationConfig(Section):
    teacher: str = ""
    """Name of the role (`roles`, of `kind: frozen`) that scores every sampled token. Empty: none."""

    mode: Literal["reward", "loss"] = "reward"
    """How the reverse KL divergence from the teacher trains: as part of each token's advantage, through
    `loss_fn`, or as a `loss` of its own beside it (embedded engine)."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of the divergence."""

    discount_factor: float = Field(default=0.0, ge=0, le=1)
    """With `mode: reward`: discount with which a token is also charged for the divergence of later tokens. 0:
    only its own."""

    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the task's own reward. 0: the teacher alone decides, and groups need only one episode."""

    @model_validator(mode="after")
    def _discounts_rewards(self) -> DistillationConfig:
        if self.mode == "loss" and self.discount_factor:
            raise ValueError(
                "discount_factor is for mode: reward; as a loss, each token has its own divergence"
            )
        return self

    @property
    def is_pure(self) -> bool:
        """Whether the task's reward has no part in training."""
        return bool(self.teacher) and not self.reward_coef


class TrainingConfig(Section):
    steps: int = Field(default=100, ge=0)
    """Training steps. Each trains on one batch of groups and publishes one policy version."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups, and so samples, per step."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per sample. 1 is for distillation without the task's reward."""

    batch_rule: Literal["groups", "differing_groups", "episodes"] = "groups"
    """When a batch is complete: after enough complete `groups`, enough complete groups whose rewards
    differ (`differing_groups`: the others are replaced), or enough accepted `episodes`, whatever their
    groups."""

    extra_groups: int = Field(default=0, ge=0)
    """Groups that a step registers beyond those it needs, so that stragglers do not hold it up. The rest
    is cancelled."""

    max_groups_per_step: int = Field(default=0, ge=0)
    """Maximum number of groups that `differing_groups` registers per step; 0: four times
    `groups_per_step`."""

    asynchronous: bool = False
    """True: the next step's episodes are sampled while the current step trains."""

    max_policy_lag: int = Field(default=1, ge=0)
    """Training steps that an episode may be behind the weights that it trains. Stale episodes are counted
    and left out."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Training again on the groups of earlier steps."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between checkpoints, from which `train --resume` continues; 0: only the last step."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints to keep in addition to the final one."""

    inspect_log_every: int = Field(default=5, ge=0)
    """Write the episodes of every n-th step, and of every evaluation, as Inspect logs to `inspect/` in the
    run folder (`inspect view --log-dir`); 0: none."""

    on_misalignment: Literal["stop", "warn"] = "stop"
    """What to do if the sampler's report does not match the trainer's computation at policy lag 0: `stop`
    before the weights change (the run can be resumed), or `warn` and leave out the sequences known to be
    wrong."""

    constrained_tokens: Literal["mask", "train", "refuse"] = "mask"
    """What to do with sampled tokens whose choice a grammar forced or cut (`response_format`, required
    tools): `mask`, they carry no loss; `train`, they train as if the policy had chosen them freely;
    `refuse`, their sequence does not train."""

    max_mean_dlogp: float = Field(default=0.1, gt=0)
    """Mean difference between the trainer's logprobs and the sampler's, at policy lag 0, above which a
    step is misaligned."""

    warn_mean_dlogp: float = Field(default=0.05, gt=0)
    """The same measure; above this a warning is counted."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over a batch, each reshuffled and split into `minibatches`."""

    microbatch_size: int = Field(default=0, ge=0)
    """Sequences per `forward_backward` call. The gradients of a minibatch's calls accumulate, so the
    result does not change. 0: the whole minibatch in one call. The embedded engine also splits by
    tokens."""

    advantage_baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted from an episode's reward: the mean of its group, or the mean of the group's
    other episodes."""

    advantage_scale: Literal["none", "group_deviation"] = "none"
    """What the difference is divided by: nothing, or the standard deviation of the group's rewards."""

    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the start policy, subtracted from the reward of each token. 0:
    none."""

    kl_discount_factor: float = Field(default=0.0, ge=0, le=1)
    """Discount with which a token is also charged for the divergence of later tokens. 0: only its own."""

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """Training on the scores of a teacher (docs/training.md)."""

    loss_fn: str = "ppo"
    """Policy-gradient loss, by Tinker's names: `ppo`, `importance_sampling` or `cispo`; or `module:name`, a
    loss of your own for the embedded engine (docs/extending.md)."""

    loss_config: dict[str, float] = Field(default_factory=dict[str, float])
    """Settings of the loss by name, such as `{bonus: 0.01}`, besides the clip thresholds."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped below 1 - clip_low, by losses that clip. 1 turns it off."""

    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped above 1 + clip_high, by losses that clip."""

    loss_mean: Literal["sequences", "tokens", "tokens_then_sequences"] = "sequences"
    """What the sum of a minibatch's token losses is divided by: the number of its `sequences`, or of its
    trained `tokens` (DAPO); or each sequence by its own tokens, and then by the sequences (GRPO's paper)."""

    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    """Correction for a sampler whose probabilities differ from the trainer's (bfloat16, other kernels, older
    weights)."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW learning rate after the warmup."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate decays toward zero after the warmup."""

    lr_floor: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the learning rate at which the decay stops."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps until the full learning rate: step n of the warmup uses n / (warmup_steps + 1) of it."""

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

    @property
    def min_group(self) -> int:
        """Episodes that a group needs to train; smaller groups are dropped and counted."""
        return 1 if self.distillation.is_pure else 2

    @model_validator(mode="after")
    def _groups_compare(self) -> TrainingConfig:
        """Refuse groups that could not train."""
        if self.group_size < self.min_group:
            raise ValueError(
                "group_size: 1 compares an episode with none: set 2 or more, or train on a teacher alone "
                "(distillation.teacher, and distillation.reward_coef: 0)"
            )
        if self.distillation.is_pure and self.batch_rule == "differing_groups":
            raise ValueError(
                "batch_rule: differing_groups replaces groups that train under distillation without the "
                "task's reward; leave it out, or set distillation.reward_coef"
            )
        return self

    @model_validator(mode="after")
    def _lag_allows(self) -> TrainingConfig:
        """Refuse what would only ever sample stale episodes."""
        if self.asynchronous and not self.max_policy_lag:
            raise ValueError(
                "asynchronous: its episodes are a step behind, so max_policy_lag must be 1 or more, not 0"
            )
        if self.replay.uses > self.max_policy_lag + 1:
            raise ValueError(
                f"replay.uses: {self.replay.uses} needs a max_policy_lag of {self.replay.uses - 1} or more, "
                f"not {self.max_policy_lag}: each further use is a step later"
            )
        return self


class SftConfig(Section):
    data: str = ""
    """JSONL file of chats. Each line is an object with `messages` in OpenAI's format (`role` and `content`,
    optionally `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, and `trainable`), and optionally
    `tools`."""

    held_out: int = Field(default=32, ge=0)
    """Number of chats, chosen by the seed, that never train and on which the loss (nll) is measured."""

    batch_size: int = Field(default=32, ge=1)
    """Chats per step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the data, each in a different order."""

    train_on_what: Literal[
        "last_assistant_message",
        "last_assistant_turn",
        "all_assistant_messages",
        "all_messages",
        "all_tokens",
        "all_user_and_system_messages",
        "customized",
    ] = "all_assistant_messages"
    """Which tokens train, by tinker_cookbook's name. `customized`: those of messages marked
    `trainable`."""

    max_tokens: int = Field(default=0, ge=0)
    """Longer chats are left out and counted, never truncated. 0: the model's context length."""


class EvaluationConfig(Section):
    episodes: int = Field(default=1000, ge=0)
    """Episodes of the evaluations before and after training. 0 turns evaluation off."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations during training; 0: none."""

    interim_episodes: int = Field(default=200, ge=1)
    """Episodes of each evaluation during training."""


class MetricsConfig(Section):
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Where metrics go in addition to `metrics.jsonl`. Each needs its extra, such as `pip install
    'tinkerscript[tensorboard]'`. TensorBoard's files are in the run folder."""

    project: str = "tinkerscript"
    """Project at W&B and Trackio. The run is named after its folder."""

    extra: list[str] = Field(default_factory=list[str])
    """Your own metrics of a training step: functions as `module:name` or `file.py:name`
    (docs/extending.md)."""


class WorkersConfig(Section):
    count: int = Field(default=2, ge=0)
    """Number of worker processes that `tinkerscript train` starts. 0: only those that you start yourself."""

    max_count: int = Field(default=0, ge=0)
    """Number of workers to which a run grows while episodes wait, from `count` up. 0: always `count`."""

    idle_s: float = Field(default=60.0, ge=0)
    """Seconds after which a worker beyond `count` that is not needed, and has no episode, is stopped."""

    cpus: float = Field(default=1.0, ge=0)
    """Processors that Ray reserves for a worker."""

    concurrency: int = Field(default=32, ge=1)
    """Number of episodes that one worker runs at once."""

    script: str = ""
    """Script with a `rollout(episode)` function. Empty: the task's own solver and scorers run."""

    allow_discard_timeout: float = Field(default=60.0, gt=0)
    """Seconds without activity after which a worker's claim expires."""

    drain_timeout: float = Field(default=20.0, ge=0)
    """Seconds that a worker's episodes get to finish after SIGTERM; what is left is handed back, and handed
    out again at once. Whoever sends the signal has to wait for 10 s more."""

    max_restarts: int = Field(default=10, ge=0)
    """Number of times that a dead worker or server is restarted before the run gives up."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> WorkersConfig:
        if 0 < self.max_count < self.count:
            raise ValueError(f"max_count: {self.max_count} is less than count: {self.count}")
        return self


class ClusterConfig(Section):
    launcher: Literal["local", "ray"] = "local"
    """What starts the processes of `train --plan`: `local`, on this machine, or `ray`, wherever a Ray cluster
    has room (docs/cluster.md); `pip install 'tinkerscript[ray]'`."""

    address: str = ""
    """With `ray`: address of the cluster's head, such as `10.0.0.1:6379`; this machine has to be one of its
    nodes. Empty: a Ray of its own on this machine, which ends with the run."""

    environment: list[str] = Field(default_factory=list[str])
    """With `ray`: names of environment variables of the trainer that workers and replicas get too, such as
    `HF_TOKEN`, besides the tokens that they need."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """With `ray`: seconds that the cluster may take to have room for what the run needs from its start."""


class RunConfig(Section):
    """The whole configuration of one run."""

    experiment_dir: str = "auto"
    """Folder of the run. `auto` creates a new one under `runs/`. With a URL, such as `s3://bucket/run_17`,
    the run works in `runs/run_17` and copies to the URL what it has finished: checkpoints, rollouts, Inspect
    logs, the journal (docs/cluster.md); `pip install 'tinkerscript[remote]'`."""

    enable_tinkerscript_mode: bool = True
    """True: episodes run through the server and workers, over HTTP. False: the task runs in the trainer's
    process."""

    method: Literal["grpo", "sft"] = "grpo"
    """How the model learns: `grpo`, reinforcement learning, or `sft`, supervised training on chats, for
    example as a warm start."""

    seed: int = 1
    """Seed for the order of samples, sampling, and training."""

    log_format: LogFormat = "text"
    """How server, workers and trainer log, in the run folder's `logs`: lines for people, or a JSON object a
    line (docs/monitoring.md)."""

    recording: str = Field(default="all", pattern=r"^(all|off|every [1-9]\d{0,5})$")
    """Whose calls and tokens the run's page can show: `all` episodes', or those of `every N` steps (such as
    `every 10`) and of evaluations; the other episodes have a line each. `off`: curves alone. Writing takes
    about 0.2 ms of processor time for an episode of 130 tokens, and 9 to 21 bytes a token."""

    recording_limit_mb: int = Field(default=20_480, ge=0)
    """Maximum size of recorded calls, tokens, and transcripts, in MiB: beyond it the oldest are dropped. 0:
    no limit."""

    recording_transcript_kb: int = Field(default=1024, ge=0, le=16_384)
    """Maximum size of the transcript of one attempt at an Inspect task, compressed, in KiB: a longer one is
    shortened. 0: transcripts are not recorded."""

    interchange_server: InterchangeConfig = Field(default_factory=InterchangeConfig)
    """The interchange server."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    """The task to train and evaluate on."""

    tasks: list[WeightedTaskConfig] = Field(default_factory=list[WeightedTaskConfig])
    """Several tasks in one run instead of `task`, each with a weight. Names must be unique."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The engine that samples and trains."""

    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """What samples model calls."""

    roles: dict[str, RoleConfig] = Field(default_factory=dict[str, RoleConfig])
    """Further models that an episode may call besides `policy`, each under its name."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Defaults for model calls."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """GRPO. `sft` uses its optimizer settings, schedule, and checkpoints."""

    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised training on chats, for `method: sft`."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Evaluation before, during, and after training."""

    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Where metrics are sent."""

    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    """Workers that the run starts."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Where the processes of a run are started."""

    @field_validator("recording", mode="before")
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
        if self.engine.backend == "tinker" and distillation.mode == "loss":
            raise ValueError(
                "training.distillation.mode: loss needs the embedded engine; a service of Tinker's protocol "
                "knows only its own losses: set mode: reward"
            )
        return self

    @model_validator(mode="after")
    def _renderer_is_used(self) -> RunConfig:
        if self.engine.renderer and self.enable_tinkerscript_mode and self.method == "grpo":
            raise ValueError(
                f"engine.renderer: {self.engine.renderer!r} would not be used, because the server renders "
                "episodes in the model's own chat format; leave it empty, or set "
                "enable_tinkerscript_mode: false to run episodes in the trainer's process"
            )
        return self

    @model_validator(mode="after")
    def _roles_can_be_reached(self) -> RunConfig:
        for name in self.roles:
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name) or name in RESERVED_ROLES:
                raise ValueError(
                    f"roles.{name}: a role's name has lower-case letters, digits, - and _, begins with a "
                    f"letter, and is not {' or '.join(RESERVED_ROLES)}"
                )
        is_outside = any(role.kind == "outside" for role in self.roles.values())
        if is_outside and not self.enable_tinkerscript_mode and self.method == "grpo":
            raise ValueError(
                "roles: episodes reach an outside server through the interchange server, which "
                "enable_tinkerscript_mode: false does without; set it to true"
            )
        return self

    @model_validator(mode="after")
    def _frozen_roles_have_a_trainer(self) -> RunConfig:
        frozen = [name for name, role in self.episode_roles.items() if role.kind == "frozen"]
        if frozen and self.inference.samples_without_trainer:
            raise ValueError(
                f"roles.{frozen[0]}: the trainer samples for a frozen role, and inference.backend: "
                f"{self.inference.backend} samples without it; use kind: outside"
            )
        if frozen and not self.enable_tinkerscript_mode and self.method == "grpo":
            raise ValueError(
                f"roles.{frozen[0]}: episodes reach roles through the interchange server, which "
                "enable_tinkerscript_mode: false does without; set it to true"
            )
        return self

    @model_validator(mode="after")
    def _replicas_hold_the_versions(self) -> RunConfig:
        inference = self.inference
        if not inference.has_replicas:
            return self
        if self.engine.backend != "embedded":
            raise ValueError(
                "inference.launch and inference.replicas get the weights that engine.backend: embedded trains"
            )
        if not self.engine.lora.rank and inference.on_publish == "finish":
            raise ValueError(
                "inference.on_publish: finish needs replicas with several versions, which are adapters: set "
                "engine.lora.rank, or leave on_publish: move"
            )
        if not self.enable_tinkerscript_mode:
            raise ValueError(
                "inference.launch and inference.replicas sample for the interchange server's clients: "
                "enable_tinkerscript_mode: false samples with the trainer's engine"
            )
        needed = self.live_versions + 1
        if self.engine.lora.rank and inference.max_loras < needed:
            raise ValueError(
                f"inference.max_loras: {inference.max_loras} is too few: on_publish: {inference.on_publish} "
                f"with training.max_policy_lag: {self.training.max_policy_lag} needs {needed}"
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
                "cluster.launcher: ray starts what episodes need; method: sft, and enable_tinkerscript_mode: "
                "false, run in one process"
            )
        if self.cluster.address and not is_ray:
            raise ValueError(f"cluster.address: {self.cluster.address!r} is for cluster.launcher: ray")
        return self

    @property
    def episode_roles(self) -> dict[str, RoleConfig]:
        """The roles that episodes may call: all but the teacher of distillation."""
        teacher = self.training.distillation.teacher
        return {name: role for name, role in self.roles.items() if name != teacher}

    @property
    def live_versions(self) -> int:
        """Versions that replicas sample from at a time."""
        return 1 + (self.training.max_policy_lag if self.inference.on_publish == "finish" else 0)

    @property
    def max_transcript_bytes(self) -> int:
        """Of one attempt's transcript, compressed; 0: none is recorded."""
        return 0 if self.recording == "off" else self.recording_transcript_kb * 1024

    @property
    def all_tasks(self) -> list[WeightedTaskConfig]:
        """The run's tasks with their weights; empty if clients register their own samples."""
        if self.tasks or not self.task.name:
            return list(self.tasks)
        return [WeightedTaskConfig(**self.task.model_dump())]

    def new_folder(self, now: datetime) -> Path:
        """The folder of a new run: `experiment_dir`, for a URL the one of its name under `runs/`, and for
        `auto` an unused name there."""
        if is_url(self.experiment_dir):
            return RUNS / name_of(self.experiment_dir)
        if self.experiment_dir != "auto":
            return Path(self.experiment_dir).expanduser()
        stem = now.strftime("%Y-%m-%d_%H-%M-%S")
        names = (stem if i == 0 else f"{stem}.{i}" for i in range(1000))
        return next(RUNS / name for name in names if not (RUNS / name).exists())


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `key.sub=value` overrides, and check every key.

    Raises ConfigError that names the file, the key and what is allowed there.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror or error}") from error
    return parse_config(text, source=str(path), overrides=overrides, folder=path.parent)


def parse_config(
    text: str, *, source: str, overrides: list[str] | None = None, folder: Path | None = None
) -> RunConfig:
    """Validate YAML text. Raises ConfigError as `load_config` does; tags that would run code are refused.

    What the text reads is seen from `folder` (default: the working directory), what overrides read from the
    working directory.
    """
    data = load_yaml(text, source=source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of config keys, not {type(data).__name__}")
    data = _with_absolute_paths(data, folder or Path.cwd())
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
    value = load_yaml(value, source=f"override {override!r}")
    section[last] = _with_absolute_paths(value, Path.cwd(), key)


_PATHS = {
    "task.name",
    "tasks.name",
    "workers.script",
    "sft.data",
    "engine.model",
    "engine.checkpoint",
    "inference.launch.python",
    "metrics.extra",
    "roles.*.model",
    "training.loss_fn",
}
"""Keys of files that a run reads. They may also hold a name: of a registered task, a module, a model."""


def _with_absolute_paths(value: Any, folder: Path, key: str = "") -> Any:
    """`value` of `key` with the paths in it made absolute, seen from `folder`."""
    key = re.sub(r"^roles\.[^.]+", "roles.*", key)
    if key == "roles.*" and isinstance(value, dict) and value.get("base_url"):
        return value  # Its model is a name at the server.
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        prefix = f"{key}." if key else ""
        return {name: _with_absolute_paths(each, folder, f"{prefix}{name}") for name, each in items}
    if isinstance(value, list):
        return [_with_absolute_paths(each, folder, key) for each in cast("list[Any]", value)]
    if key not in _PATHS or not isinstance(value, str) or value in ("", "tiny"):
        return value
    if python := re.fullmatch(r"(.+\.py)([@:].+)?", value):
        return f"{_seen_from(folder, python[1])}{python[2] or ''}"
    path = _seen_from(folder, value)
    is_path = key in ("sft.data", "inference.launch.python") or (
        key in ("engine.model", "engine.checkpoint", "roles.*.model") and path.exists()
    )
    return str(path) if is_path else value


def _seen_from(folder: Path, path: str) -> Path:
    return (folder / Path(path).expanduser()).absolute()


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
        known = _known_keys(loc[:-1])
        if alike := difflib.get_close_matches(str(loc[-1]), known, n=3):
            return f"unknown key {key!r}; did you mean {' or '.join(alike)}?"
        if elsewhere := _sections_with(str(loc[-1])):
            return f"unknown key {key!r}; did you mean {' or '.join(elsewhere)}?"
        return f"unknown key {key!r}; {where} knows {', '.join(known)}"
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


def _sections_with(key: str) -> list[str]:
    """The keys of all sections that end in `key`."""
    sections = ((name, field.annotation) for name, field in RunConfig.model_fields.items())
    return [
        f"{name}.{key}"
        for name, model in sections
        if isinstance(model, type) and issubclass(model, Section) and key in model.model_fields
    ]


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML, with every key."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def import_name(text: str, *, what: str) -> object:
    """The object that `text` names in the user's own code: `module:name`, or `path/to/file.py:name`.

    `what`: the config key it comes from. Raises ConfigError with both, for a name that cannot be imported.
    """
    source, separator, name = text.rpartition(":")
    if not (separator and source and name):
        raise ConfigError(f"{what}: {text!r} is not of the form module:name or file.py:name")
    try:
        return getattr(_module_from(source), name)
    except Exception as error:
        remedy = "check the path" if source.endswith(".py") else f"is {source} installed or on PYTHONPATH?"
        if not isinstance(error, ImportError | AttributeError | OSError):
            remedy = f"importing it raised {type(error).__name__}"
        raise ConfigError(f"{what}: cannot import {text!r}: {error}; {remedy}") from error


def _module_from(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).expanduser()
    spec = importlib.util.spec_from_file_location(f"_user_code_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up there.
    spec.loader.exec_module(module)
    return module
