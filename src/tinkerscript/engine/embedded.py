"""`EmbeddedEngine`: samples and trains one base model, and copies of it, on one thread of this process.

Invariant: a sampling client holds its own copy of the weights, so it samples from one policy version while
training goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tinker import APIFuture

from tinkerscript.engine.checkpoint import load_model, load_optimizer_state
from tinkerscript.engine.context import check_device, compute_dtype, open_context
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.training import EmbeddedTrainingClient, Trainer
from tinkerscript.errors import EngineError
from tinkerscript.model_folder import model_folder

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine:
    """A Hugging Face causal language model with Tinker's training and sampling clients.

        with EmbeddedEngine("tiny") as engine:
            training = engine.create_training_client()
            training.forward_backward(data, "ppo").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            response = sampling.sample(prompt, 4, tinker.SamplingParams(max_tokens=64)).result()

    `data` is a list of `tinker.Datum`: `model_input` ids [T], and `loss_fn_inputs` such as `target_tokens`
    int64 [T], `logprobs` and `advantages` float32 [T]. `response.sequences` has four sequences, each with
    `tokens` and `logprobs` [its length].
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        checkpoint_dir: Path = Path("checkpoints"),
        seed: int = 0,
        threads: int = 1,
        max_batch: int = 128,
        device: str = "cpu",
        dtype: str = "float32",
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Load the model in `folder`; a string may also be `tiny`, the model that ships with the
        package, or the id of a model of the Hugging Face Hub.

        checkpoint_dir: where `save_state` writes.
        seed: of requests without a seed of their own.
        threads: torch's threads, for the whole process.
        max_batch: the most sequences that decode together.
        dtype: of matrix products: float32, bfloat16, or auto. Weights that train are float32.
        notes: text files, by name, that `save_state` adds to a checkpoint.

        Close the engine, or use it as a context manager. Raises EngineError for a model that cannot be
        loaded or decoded exactly, ConfigError for a string that names no model.
        """
        torch.set_num_threads(threads)
        folder = model_folder(folder, weights=True) if isinstance(folder, str) else folder
        self.folder = folder
        self.checkpoint_dir = checkpoint_dir
        self._notes = notes
        check_device(device)
        self.dtype = compute_dtype(dtype, device)
        self._model = load_model(folder, device=device)
        self.shares_prefixes: bool = shares_prefixes(self._model)
        """Whether training computes a shared prefix once; if not, every sequence is a row of its own."""

        self._trainer = self._trainer_of(self._model)
        self.context = open_context(self._model, folder, dtype=self.dtype, seed=seed, max_batch=max_batch)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response together, at most."""
        return self.context.max_context

    @property
    def vocabulary(self) -> int:
        return self.context.vocabulary

    @property
    def architecture(self) -> str:
        """Hugging Face's model type, such as `qwen3`."""
        return self._model.config.model_type

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail unfinished requests and end the engine's thread."""
        self.context.thread.close()

    def create_training_client(self) -> EmbeddedTrainingClient:
        """A client that trains the engine's own model; all of these clients train the same weights."""
        return EmbeddedTrainingClient(self.context, self._trainer, self.checkpoint_dir, self._notes)

    def create_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A client that samples from the engine's own weights, as they are when the request's turn comes."""
        return self.create_training_client().save_weights_and_get_sampling_client()

    def train_copy(
        self, folder: Path | None = None, *, optimizer: bool = False
    ) -> APIFuture[EmbeddedTrainingClient]:
        """A client with weights of its own: a copy of the base model's, or those of a checkpoint.

        `optimizer`: load the checkpoint's optimizer state too. Raises EngineError for a checkpoint of
        another model, or without that state.
        """

        def job() -> EmbeddedTrainingClient:
            trainer = self._trainer_of(self._checked_model(folder or self.folder))
            if optimizer and folder is not None:
                trainer.load_optimizer_state(load_optimizer_state(folder))
            return EmbeddedTrainingClient(self.context, trainer, self.checkpoint_dir, self._notes)

        return self.context.run(job)

    def sample_copy(self, folder: Path | None = None) -> APIFuture[EmbeddedSamplingClient]:
        """A client that samples from the base model as it is on disk, or from a checkpoint."""
        return self.context.run(lambda: freeze(self.context, self._checked_model(folder or self.folder)))

    def _trainer_of(self, model: Any) -> Trainer:
        return Trainer(model, share_prefixes=self.shares_prefixes, compute_dtype=self.dtype)

    def _checked_model(self, folder: Path) -> Any:
        model = load_model(folder, device=str(self._model.device))
        mine, other = self._model.config, model.config
        same = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
        differing = [name for name in same if getattr(mine, name, None) != getattr(other, name, None)]
        if differing:
            raise EngineError(f"the checkpoint {folder} is of another model: {', '.join(differing)} differ")
        return model
