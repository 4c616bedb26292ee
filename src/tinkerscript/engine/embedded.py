"""`EmbeddedEngine`: samples and trains a base model and copies of it, on one thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tinker import APIFuture

from tinkerscript.engine.context import (
    check_device,
    compute_dtype,
    exact_context,
    open_context,
    short_context,
)
from tinkerscript.engine.decoder import Decoder, FusedDecoder, HubDecoder, decoder_for, own_logits
from tinkerscript.engine.image_features import ImageReader
from tinkerscript.engine.kv_cache import PLACES, CacheBudget
from tinkerscript.engine.memory import cache_budget, cache_bytes
from tinkerscript.engine.packing import attend_in_segments, shares_prefixes
from tinkerscript.engine.quantization import Quantization
from tinkerscript.engine.routers import routing_of
from tinkerscript.engine.routing import Routing
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.training import AllWeights, EmbeddedTrainingClient, Trainer, Weights
from tinkerscript.engine.weights import (
    LoraSettings,
    checkpoint_activations,
    load_model,
    load_optimizer_state,
    load_same_model,
)
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import base_of_adapter, model_folder

if TYPE_CHECKING:
    from tinkerscript.engine.frozen import FrozenModels, FrozenWeights
    from tinkerscript.engine.lora import LoraBase
    from tinkerscript.engine.ranks import Ranks

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine:
    """A Hugging Face causal language model with Tinker's training and sampling clients.

        with EmbeddedEngine("tiny") as engine:
            training = engine.create_training_client()
            training.forward_backward(data, "ppo").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            response = sampling.sample(prompt, 4, tinker.SamplingParams(max_tokens=64)).result()

    `EmbeddedTrainingClient` describes `data`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        checkpoint_dir: Path = Path("checkpoints"),
        seed: int = 0,
        threads: int = 1,
        max_batch: int = 128,
        cache_tokens: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        notes: Mapping[str, str] | None = None,
        lora: LoraSettings | None = None,
        quantization: Quantization = "none",
        activation_checkpointing: bool = False,
        devices: int = 1,
        sharding: Literal["replicate", "shard"] = "replicate",
        routing_replay: bool = False,
        log_dir: Path | None = None,
    ) -> None:
        """Load the model in `folder`, or the LoRA adapter and its base.

        docs/config.md#engine describes the other arguments. Raises EngineError for a model that cannot be
        loaded or decoded exactly, and ConfigError for an unknown name or too many devices.

        Args:
            folder: A path, `tiny`, or a Hugging Face id.
            checkpoint_dir: Where `save_state` writes.
            seed: For requests without a seed.
            notes: Text files, by name, that `save_state` adds.
            lora: Train an adapter over the model. None: train all weights.
            log_dir: Where the other devices' processes log.
        """
        torch.set_num_threads(threads)
        folder = model_folder(folder, weights=True) if isinstance(folder, str) else folder
        base = base_of_adapter(folder)
        if base is not None and (lora is not None or devices > 1):
            raise EngineError(
                f"{folder} holds a LoRA adapter already; name its base as the model, {base}, and the adapter "
                "as the checkpoint to start from (engine.checkpoint)"
            )
        adapter, folder = folder, base or folder
        self.folder = folder
        self.checkpoint_dir = checkpoint_dir
        self._notes = notes
        check_device(device)
        self.dtype = compute_dtype(dtype, device)
        # Trained weights are float32. A frozen base uses the products' dtype.
        frozen = lora is not None or base is not None
        loaded_dtype = self.dtype if frozen else torch.float32
        with ExitStack() as undo:
            self._ranks: Ranks | None = None
            if devices > 1:
                from tinkerscript.engine.ranks import GROUP_TIMEOUT_S, Ranks, RankSpec, check_devices

                check_devices(devices, device)
                autocast = torch.float32 if frozen else self.dtype
                spec = RankSpec(
                    folder=folder,
                    device=device,
                    dtype=loaded_dtype,
                    autocast=autocast,
                    quantization=quantization,
                    lora=lora,
                    sharding=sharding,
                    activation_checkpointing=activation_checkpointing,
                    threads=threads,
                    timeout_s=GROUP_TIMEOUT_S,
                )
                self._ranks = Ranks(devices, spec, log_dir)
                undo.callback(self._ranks.close)
                device = spec.own_device
            self._model = load_model(folder, device=device, dtype=loaded_dtype, quantization=quantization)
            own = own_logits(self._model)
            self.shares_prefixes: bool = shares_prefixes(self._model, own)

            self._in_segments = self.shares_prefixes and attend_in_segments(self._model, own)
            self._checkpoints = activation_checkpointing
            kind = decoder_for(self._model, own, frozen=frozen)
            self.is_fused: bool = kind is FusedDecoder
            self.routing: Routing | None = routing_of(self._model, own) if routing_replay else None
            longest = exact_context(self._model.config)
            choices = 0 if self.routing is None else self.routing.token_bytes
            token = cache_bytes(self._model, self.dtype, [PLACES], choices) // PLACES
            cache = cache_tokens * token or cache_budget(
                self._model,
                lora,
                self.dtype,
                max_rows=max_batch,
                max_context=longest,
                checkpointing=activation_checkpointing,
                choices=choices,
            )
            decoder: Callable[..., Decoder] = kind
            if self.routing is not None:  # A mixture is never fused.
                decoder = partial(HubDecoder, routing=self.routing)
            self._make_decoder = partial(decoder, dtype=self.dtype)
            self._lora = lora
            if frozen and activation_checkpointing:
                checkpoint_activations(self._model)
            self._images = ImageReader(self._model, folder, devices=devices)
            self._base = _lora_base(self._model, folder, decoder, lora, adapter) if frozen else None
            if base is not None:
                weights = self._weights_of(adapter, None)
            else:
                weights = self._new_weights(lora) if frozen else self._all_weights(self._model)
            self._trainer = self._trainer_of(weights, self._ranks)
            self._frozen: FrozenModels | None = None
            self.context = open_context(
                self._model,
                folder,
                seed=seed,
                max_batch=max_batch,
                budget=CacheBudget(cache),
                max_context=min(longest, cache // token // PLACES * PLACES),
                images=self._images,
            )
            undo.pop_all()

    @property
    def warnings(self) -> list[str]:
        found = [short_context(self._model.config)]
        if self.max_context < (longest := exact_context(self._model.config)):
            found.append(
                f"prompt and reply together hold {self.max_context:,} tokens here, of this model's "
                f"{longest:,}: keys and values of more do not fit; raise engine.cache_tokens, or free memory"
            )
        if not self.shares_prefixes:
            found.append(
                f"{self.architecture}: training computes a shared prompt again for each sequence, which "
                "takes longer: this model gives other logprobs in a row with branches"
            )
        return [each for each in found if each]

    @property
    def ranks(self) -> Ranks | None:
        return self._ranks

    @property
    def max_context(self) -> int:
        return self.context.max_context

    @property
    def vocabulary(self) -> int:
        return self.context.vocabulary

    @property
    def lora(self) -> LoraSettings | None:
        return self._lora

    @property
    def is_lora(self) -> bool:
        return self._lora is not None

    @property
    def version_bytes(self) -> int:
        dtype = torch.float32 if self._base else self.dtype
        return dtype.itemsize * sum(each.numel() for each in self._trainer.weights.parameters)

    @property
    def architecture(self) -> str:
        return self._model.config.model_type

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail unfinished requests, and end the thread and other processes."""
        self.context.thread.close()
        if self._ranks is not None:
            self._ranks.close()

    def create_training_client(self) -> EmbeddedTrainingClient:
        """Return a client of the engine's own weights."""
        return EmbeddedTrainingClient(self.context, self._trainer, self.checkpoint_dir, self._notes)

    def create_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        return self.create_training_client().save_weights_and_get_sampling_client()

    def train_copy(
        self,
        folder: Path | None = None,
        *,
        optimizer: bool = False,
        lora: LoraSettings | None = None,
        checkpoint_dir: Path | None = None,
    ) -> APIFuture[EmbeddedTrainingClient]:
        """Return a client with separate weights: a copy of the base model's, or a checkpoint's.

        With LoRA it trains an adapter over the shared base, a new one with `lora` (None: the engine's
        settings). Raises EngineError for another model's checkpoint.
        """

        def job() -> EmbeddedTrainingClient:
            trainer = self._trainer_of(self._weights_of(folder, lora))
            if optimizer and folder is not None:
                trainer.load_optimizer_state(load_optimizer_state(folder))
            target = checkpoint_dir or self.checkpoint_dir
            return EmbeddedTrainingClient(self.context, trainer, target, self._notes)

        return self.context.run(job)

    def sample_copy(self, folder: Path | None = None) -> APIFuture[EmbeddedSamplingClient]:
        return self.context.run(lambda: freeze(self.context, lambda: self._decoder_of(folder)))

    def open_frozen(self, folder: Path, adapter: Path | None = None) -> FrozenWeights:
        """Load a model, perhaps with a LoRA `adapter`, that never trains. Raises EngineError.

        Blocks the caller, but not the engine, and shares the engine's frozen base.
        """
        return self.context.thread.call(self._frozen_models).result().open(folder, adapter)

    def _frozen_models(self) -> FrozenModels:
        if self._frozen is None:
            from tinkerscript.engine.frozen import (
                FrozenBase,
                FrozenModels,
            )

            own = self._base and FrozenBase(self._base, self.context, self.shares_prefixes)
            device = str(self._model.device)
            self._frozen = FrozenModels(self.context, own, device=device, dtype=self.dtype)
        return self._frozen

    def write_weights(self, folder: Path) -> APIFuture[None]:
        return self.context.run(lambda: self._trainer.weights.write(folder, self.dtype))

    def free_memory(self) -> APIFuture[None]:
        return self.context.run(torch.cuda.empty_cache)

    def write_canaries(self, folder: Path) -> APIFuture[list[Path]]:
        """Write weights that show whether a sampler applies adapters to all kinds of modules.

        `none` changes nothing; other folders greatly change the kind that they name, such as `q_proj`.
        """

        def job() -> list[Path]:
            if self._lora is None or self._base is None:
                (folder / "none").mkdir(parents=True)
                self._trainer.weights.write(folder / "none", self.dtype)
                return [folder / "none"]
            canaries = {"none": self._base.new_adapter(self._lora)}
            for kind in canaries["none"].kinds:
                canaries[kind] = self._base.new_adapter(replace(self._lora, targets=(kind,)))
                canaries[kind].exaggerate()
            for name, canary in canaries.items():
                (folder / name).mkdir(parents=True)
                canary.write(folder / name, self.dtype)
            return [folder / name for name in canaries]

        return self.context.run(job)

    def _decoder_of(self, folder: Path | None) -> Decoder:
        if self._base is not None:
            return self._base.plain if folder is None else self._base.decoder_of(folder)
        return self._make_decoder(load_same_model(self._model, folder or self.folder))

    def _weights_of(self, folder: Path | None, lora: LoraSettings | None) -> Weights:
        if self._base is not None:
            return self._new_weights(lora) if folder is None else self._base.adapter_of(folder)
        return self._all_weights(load_same_model(self._model, folder or self.folder))

    def _new_weights(self, lora: LoraSettings | None) -> Weights:
        settings = lora or self._lora
        assert self._base is not None
        assert settings is not None
        return self._base.new_adapter(settings)

    def _all_weights(self, model: Any) -> Weights:
        if self._in_segments:
            attend_in_segments(model)
        if self._checkpoints:
            checkpoint_activations(model)
        return AllWeights(model, self._make_decoder)

    def _trainer_of(self, weights: Weights, ranks: Ranks | None = None) -> Trainer:
        if ranks is not None:
            return _leading_trainer(ranks, weights, share_prefixes=self.shares_prefixes, routing=self.routing)
        autocast = torch.float32 if self._base else self.dtype
        return Trainer(
            weights,
            share_prefixes=self.shares_prefixes,
            compute_dtype=autocast,
            routing=self.routing,
            images=self._images,
        )


def _lora_base(
    model: Any, folder: Path, kind: Callable[..., Decoder], settings: LoraSettings | None, adapter: Path
) -> LoraBase:
    from tinkerscript.engine.lora import LoraBase, settings_of  # Importing PEFT takes half a second.

    base = LoraBase(model, folder, kind)
    base.prove(settings or settings_of(adapter))
    return base


def _leading_trainer(
    ranks: Ranks, weights: Weights, *, share_prefixes: bool, routing: Routing | None
) -> Trainer:
    from tinkerscript.engine.distributed import LeadingTrainer

    ranks.join()
    return LeadingTrainer(ranks, weights, share_prefixes=share_prefixes, routing=routing)
