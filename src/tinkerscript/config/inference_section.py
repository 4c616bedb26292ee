"""The settings of what samples: replicas, servers of others, and the roles of an episode."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from tinkerscript.config.section import Section, http_url


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
    """Python of the environment that has vLLM and tinkerscript (`pip install tinkerscript`), such as
    `vllm-env/bin/python`. Empty: this one."""

    args: list[str] = Field(default_factory=list[str])
    """Further arguments of the server, such as vLLM's `--gpu-memory-utilization=0.5`."""

    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Further environment variables of the replicas."""


class InferenceConfig(Section):
    backend: Literal["trainer", "vllm"] = "trainer"
    """What samples: the `trainer`'s engine; vLLM replicas that get each version of the LoRA adapter
    that trains (`launch` or `replicas`, docs/vllm.md); or for `tinkerscript serve` your own server
    (`base_url`, docs/samplers.md), whose tokenizer and config are in the folder `engine.model`."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """Replicas to start."""

    replicas: list[str] = Field(default_factory=list[str])
    """URLs of running replicas to train with."""

    on_publish: Literal["move", "finish", "continue"] = "move"
    """What happens to running episodes when weights are published. `move`: a model call ends with the weights
    that it began with, and the episode's next one has the newest. `continue`: the newest go on with a call at
    its next token. `finish`, with replicas: an episode keeps the weights that it began with, as long as they
    may train (`training.max_policy_lag`)."""

    sleep: bool = False
    """Whether replicas give up their GPUs' memory while the trainer trains, to share a GPU with it (vLLM's
    sleep mode, in a server in development mode). Model calls wait meanwhile."""

    max_loras: int = Field(default=4, ge=2)
    """How many adapters a replica holds at once. It needs room for the newest, for those that episodes still
    use, and for the next one. Evaluations that run while later steps train use the remaining room."""

    base_url: str = ""
    """URL of the vLLM server, such as `http://127.0.0.1:8000`, with or without `/v1`."""

    model: str = ""
    """Name of the model at that server. Empty: the only one that it serves."""

    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key. Empty: the server needs none."""

    start_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds to wait for a server or a replica that runs already to respond at the start."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return http_url(value)

    @field_validator("replicas")
    @classmethod
    def _are_http(cls, value: list[str]) -> list[str]:
        return [http_url(each) for each in value]

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> InferenceConfig:
        if not self.has_replicas:
            return self
        if self.backend == "trainer":
            raise ValueError("launch and replicas are for backend: vllm, not trainer")
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
    def samples_without_trainer(self) -> bool:
        """Whether the interchange server samples by itself, from a server whose weights do not train."""
        return self.backend != "trainer" and not self.has_replicas


RESERVED_ROLES = ("policy", "side")
"""Names by which requests reach the policy."""


class RoleConfig(Section):
    kind: Literal["frozen", "outside", "trained"]
    """`frozen` is another model with weights that never change. `outside` is an OpenAI-compatible server,
    such as a judge, and only the interchange server knows its key. Neither trains. `trained` is a second
    policy, such as an opponent, which trains in the same run with its own optimizer, rewards and
    checkpoints."""

    model: str = ""
    """For `trained`: the checkpoint that the role starts from; empty: the weights that the run starts from.
    For `frozen`: folder or Hub id of a model, or a checkpoint of a run; with `engine.backend: tinker` also
    a `tinker://` path or a base model of the service; empty: the weights that the run starts from. With
    `base_url`: the model's name at that server; empty, for `frozen`: the only one that it serves."""

    base_url: str = ""
    """URL of a server, with or without `/v1`. `outside` needs one. For `frozen`: that of a vLLM server, whose
    model has the tokenizer of the one that trains; empty: the run's engine holds the model."""

    api_key_env: str = ""
    """Name of the environment variable that holds the server's API key. Empty: it needs none."""

    learning_rate: float = Field(default=0.0, ge=0)
    """For `trained`: the role's own learning rate; 0: `training.learning_rate`. The schedule is the run's."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return http_url(value)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> RoleConfig:
        if self.kind == "outside" and not (self.base_url and self.model):
            raise ValueError(
                "kind: outside needs base_url and model: an OpenAI-compatible server and its model"
            )
        if self.kind == "trained" and self.base_url:
            raise ValueError("kind: trained has no base_url: the run's own engine trains and samples it")
        if self.kind != "trained" and self.learning_rate:
            raise ValueError(f"learning_rate is for kind: trained; kind: {self.kind} does not learn")
        if self.api_key_env and not self.base_url:
            raise ValueError("api_key_env is the key of a server: give base_url")
        if "@" in self.base_url.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url has a password in it; give the key in the variable of api_key_env")
        return self
