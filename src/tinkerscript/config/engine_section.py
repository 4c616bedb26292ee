from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from tinkerscript.config.section import Section, http_url

Dtype = Literal["auto", "float32", "bfloat16"]


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapter. 0: all weights train (at a service, an adapter of rank 32)."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by `alpha / rank`. Services always use 32."""

    targets: list[str] = Field(default_factory=lambda: ["attn", "mlp", "unembed"], min_length=1)
    """`attn`, `mlp`, `unembed` (the head), or in the embedded engine the last part of a linear module's name
    (`q_proj`)."""


class EngineConfig(Section):
    backend: str = "embedded"
    """`embedded`: the trainer's own engine. `tinker`: a service with Tinker's protocol (docs/tinker.md); its
    key is in TINKER_API_KEY."""

    model: str = "tiny"
    """`tiny` (in the package), a Hugging Face folder or id (`Qwen/Qwen3-8B`, `Qwen/Qwen3-8B@REVISION`), or a
    `.gguf` file. A folder wins over an id. `tinker` reads no weights."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """An adapter to train over the frozen model."""

    checkpoint: str = ""
    """Weights to start from, with a fresh optimizer: a checkpoint folder of the same backend
    (`runs/.../checkpoints/final`), or with `tinker` a `tinker://` path."""

    base_url: str = ""
    """URL of the service. Empty: TINKER_BASE_URL, or the hosted one."""

    service_model: str = ""
    """The model's name at the service. Empty: its only model."""

    threads: int = Field(default=0, ge=0)
    """Torch threads. 0 chooses: one for a small model, because more are slower; up to four if a GPU computes;
    otherwise every core, less one for the server with Ray."""

    max_batch: int = Field(default=128, ge=1)
    """Maximum sequences decoded together."""

    cache_tokens: int = Field(default=0, ge=0)
    """Tokens in the key-value cache. Calls that do not fit wait. 0: what memory allows
    (docs/engine.md#memory)."""

    device: str = "cpu"
    """Torch device: `cpu`, `cuda`, `cuda:1`."""

    devices: int = Field(default=1, ge=1)
    """GPUs to train on, or processes with `device: cpu` (docs/devices.md)."""

    sharding: Literal["replicate", "shard"] = "replicate"
    """`replicate`: each device has all weights. `shard`: each has a part (FSDP2), and the first also a copy
    of all to sample from."""

    dtype: Dtype = "float32"
    """Precision of matrix products. `auto`: bfloat16 if the hardware supports it; sampler and trainer then
    differ slightly (docs/models.md)."""

    quantization: Literal["none", "int8", "nf4"] = "none"
    """Store the frozen base's linear modules in 8 bits or in 4 (`nf4`, as in QLoRA; needs
    `tinkerscript[quantized]`). Takes less memory and more time (docs/models.md)."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    routing_replay: bool = False
    """Train with the experts that the sampler chose, which rounding can change (R3, docs/models.md). Only for
    mixtures of experts."""

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
