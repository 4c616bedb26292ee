"""The `engine` section: which model trains, and where."""

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
    """Rank of the adapter. 0 trains all weights of the embedded engine; a service then uses 32."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by `alpha / rank`. A service always uses 32."""

    targets: list[str] = Field(default_factory=lambda: ["attn", "mlp", "unembed"], min_length=1)
    """Layers with adapters: `attn`, `mlp`, `unembed` (the head), and in the embedded engine also the last
    part of a linear module's name, such as `q_proj`."""


class EngineConfig(Section):
    backend: str = "embedded"
    """`embedded`: the engine in the trainer's process. `tinker`: a service with Tinker's protocol
    (docs/tinker.md), with its key in TINKER_API_KEY."""

    model: str = "tiny"
    """`tiny` (ships with the package), a Hugging Face folder, a `.gguf` file, or a Hugging Face id
    (`Qwen/Qwen3-8B`, `Qwen/Qwen3-8B@REVISION`). A folder wins over an id. `tinker` reads only the tokenizer,
    chat template and config.json."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """A LoRA adapter to train while the model stays frozen."""

    checkpoint: str = ""
    """Weights to start from, with a fresh optimizer: a checkpoint folder of a run with the same backend
    (`runs/.../checkpoints/final`), or with `tinker` a `tinker://` path. Empty: the model's own."""

    base_url: str = ""
    """URL of the `tinker` service. Empty: TINKER_BASE_URL, or the hosted service."""

    service_model: str = ""
    """The model's name at the `tinker` service. Empty: the only model there."""

    threads: int = Field(default=0, ge=0)
    """Torch threads of the embedded engine. 0: one for a small model, where more are slower, otherwise every
    core the trainer may use. The run folder's config shows the number."""

    max_batch: int = Field(default=128, ge=1)
    """Maximum sequences decoded together."""

    cache_tokens: int = Field(default=0, ge=0)
    """Size of the embedded engine's key-value cache, for running sequences and reusable prefixes. A call that
    does not fit waits. 0: as many tokens as fit into free memory (docs/engine.md#memory)."""

    device: str = "cpu"
    """Torch device of the embedded engine: `cpu`, `cuda`, `cuda:1`."""

    devices: int = Field(default=1, ge=1)
    """Devices to train on: GPUs with `device: cuda`, processes with `cpu` (docs/devices.md)."""

    sharding: Literal["replicate", "shard"] = "replicate"
    """`replicate`: each device has all weights. `shard`: each has a part (FSDP2), and the first also a full
    copy to sample from."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the embedded engine's matrix products. `auto`: bfloat16 where the hardware supports it;
    sampler and trainer then differ slightly (docs/models.md)."""

    quantization: Literal["none", "int8", "nf4"] = "none"
    """Store the frozen base's linear modules in 8 bits or in 4 (`nf4`, as in QLoRA; needs
    `tinkerscript[quantized]`). Takes less memory and more time (docs/models.md)."""

    activation_checkpointing: bool = False
    """Recompute activations in the embedded engine's backward pass: less memory, about a third more time."""

    routing_replay: bool = False
    """Train a mixture of experts with the experts that the embedded engine chose while sampling (R3), which
    rounding can change (docs/models.md). Refused for other models."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments for the chat template, such as `{enable_thinking: false}`."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return http_url(value)

    @model_validator(mode="after")
    def _devices_are_shared_out(self) -> EngineConfig:
        if self.devices > 1 and self.backend == "tinker":
            raise ValueError(
                f"devices: {self.devices}: only the embedded engine trains on several devices; a Tinker "
                "service manages its own"
            )
        if self.routing_replay and self.backend == "tinker":
            raise ValueError(
                "routing_replay: only the embedded engine replays the experts that it chose; leave it out"
            )
        if self.quantization != "none":
            for key, is_wrong, remedy in (
                ("lora.rank: 0", not self.lora.rank, "a quantized base is frozen; set a rank"),
                ("backend: tinker", self.backend == "tinker", "a service chooses its own precision"),
                ("sharding: shard", self.sharding == "shard", "FSDP2 does not shard integers; use replicate"),
            ):
                if is_wrong:
                    raise ValueError(f"quantization: {self.quantization} with {key}: {remedy}")
        if self.devices > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"device: {self.device!r} cannot be shared out over devices: {self.devices}; use cpu, or "
                "cuda for one GPU each"
            )
        return self
