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
    """Replicas to start."""

    gpus: list[int] | Literal["any"] = Field(default_factory=list[int])
    """GPUs to use; each replica takes the next `tensor_parallel`. `any`: Ray chooses. Empty: none (vLLM's CPU
    build)."""

    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a replica."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs per replica."""

    python: str = ""
    """Python with vLLM and tinkerscript. Empty: the trainer's."""

    args: list[str] = Field(default_factory=list[str])
    """Arguments of vLLM's server, such as `--gpu-memory-utilization=0.5`."""

    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables for the replicas."""


class InferenceConfig(Section):
    backend: Literal["trainer", "vllm"] = "trainer"
    """`trainer`: the engine that trains. `vllm`: replicas that get each step's weights (`launch` or
    `replicas`, docs/vllm.md), or for `tinkerscript serve` your own server (`base_url`, docs/samplers.md)."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """vLLM replicas that the run starts."""

    replicas: list[str] = Field(default_factory=list[str])
    """URLs of running vLLM replicas."""

    on_publish: Literal["move", "finish", "continue"] = "move"
    """When running episodes get new weights: at the next model call (`move`) or token (`continue`), or once
    their own are too old to train (`finish`, replicas only)."""

    sleep: bool = False
    """While the trainer uses the replicas' GPU, they release its memory and model calls wait
    (docs/vllm.md)."""

    max_loras: int = Field(default=4, ge=2)
    """Adapters that a replica holds: the newest, the next, and older ones in use. More let evaluations
    overlap with later steps."""

    base_url: str = ""
    """URL of your vLLM server, with or without `/v1`."""

    model: str = ""
    """The model's name there. Empty: its only model."""

    api_key_env: str = ""
    """Environment variable with the API key of your server or of `replicas`."""

    start_timeout_s: float = Field(default=30.0, ge=0)
    """Seconds to wait for a server or replica that should already run."""

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
            raise ValueError("launch and replicas need backend: vllm; backend: trainer samples by itself")
        if self.base_url:
            raise ValueError("give base_url for `tinkerscript serve`, or launch or replicas for training")
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
        return bool(self.launch.replicas or self.replicas)

    @property
    def samples_without_trainer(self) -> bool:
        """Whether the interchange server asks a model server directly, without trained weights."""
        return self.backend != "trainer" and not self.has_replicas


# Names by which requests already reach the policy.
RESERVED_ROLES = ("policy", "side")


class RoleConfig(Section):
    kind: Literal["frozen", "outside", "trained"]
    """`frozen`: a model that does not train. `outside`: an OpenAI-compatible server, such as a judge.
    `trained`: a second policy, such as an opponent, with its own optimizer and checkpoints."""

    model: str = ""
    """Weights: a folder or Hugging Face id (both `frozen`), a checkpoint, or with `engine.backend: tinker` a
    `tinker://` path or a model of the service. Empty: the run's own at its start. With `base_url`: the
    model's name there (`frozen`: empty for the only one)."""

    base_url: str = ""
    """URL of an `outside` role's server, or for `frozen` of a vLLM server with the policy's tokenizer. Empty:
    the run's engine."""

    api_key_env: str = ""
    """Environment variable with the server's API key."""

    learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate of a `trained` role. 0: `training.learning_rate`."""

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
            raise ValueError("api_key_env is the key of a server: set base_url too")
        if "@" in self.base_url.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "base_url contains a password; put the key in the variable that api_key_env names"
            )
        return self
