"""The settings of what trains."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from tinkerscript.config.section import Section, http_url


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapter. 0: the embedded engine trains all weights, and a service gets 32."""

    alpha: float = Field(default=32.0, gt=0)
    """What the adapter adds is scaled by `alpha` / `rank`. A service of Tinker's protocol has 32."""

    targets: list[str] = Field(default_factory=lambda: ["attn", "mlp", "unembed"], min_length=1)
    """What has adapters: `attn`, `mlp`, `unembed` (the head), or with the embedded engine linear modules by
    their last names, such as `q_proj`."""


class EngineConfig(Section):
    backend: str = "embedded"
    """What trains and samples: `embedded`, the engine in the trainer's process, or `tinker`, a service that
    speaks Tinker's protocol (the Tinker service, `tinkerscript engine --port`, or another). The API key is
    read only from the environment variable TINKER_API_KEY."""

    model: str = "tiny"
    """`tiny` (ships with the package), the folder of a Hugging Face causal language model, a `.gguf` file, or
    the id of a model in the Hugging Face Hub (`Qwen/Qwen3-8B`, or `Qwen/Qwen3-8B@REVISION`). A folder comes
    before a model of the same name in the hub. With `tinker`, only tokenizer, chat format, and config.json
    are needed."""

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

    threads: int = Field(default=0, ge=0)
    """Torch threads of the embedded engine. 0: one for a small model, which is fastest so, else the cores
    that the trainer may use; the config in the run folder has the number."""

    max_batch: int = Field(default=128, ge=1)
    """Maximum number of sequences decoded together."""

    cache_tokens: int = Field(default=0, ge=0)
    """Tokens whose keys and values the embedded engine holds at once, of sequences that decode and of earlier
    ones that later calls may begin with. Calls wait if there is no room. 0: what fits into free memory."""

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

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return http_url(value)

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
