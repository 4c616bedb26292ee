"""`EmbeddedEngine`: one base model on one thread of this process, with the methods of Tinker's clients.

It takes and returns Tinker's own types. A sampling client holds its own copy of the weights, so what
was sampled under a policy version stays under it while training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tokenizers import Tokenizer

from tinkerscript.engine.checkpoint import load_model, load_optimizer_state
from tinkerscript.engine.context import EngineContext, compute_dtype, eos_ids_of, exact_context
from tinkerscript.engine.decoder import decoder_for
from tinkerscript.engine.grammars import Grammars
from tinkerscript.engine.packing import shares_prefixes
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.training import Trainer
from tinkerscript.engine.training_client import EmbeddedTrainingClient
from tinkerscript.engine.worker_thread import EngineThread
from tinkerscript.errors import EngineError


class EmbeddedEngine:
    """Loads a Hugging Face causal model from `folder`; trains it, and copies of it.

    Checkpoints go to `checkpoint_dir`. `threads` are torch's threads of this process. `dtype` is that of
    matrix products: float32, bfloat16, or auto; weights that train are float32. Use as a context manager,
    or call `close()`. Raises EngineError for a model that cannot be loaded or decoded exactly.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoint_dir: Path,
        seed: int = 0,
        threads: int = 1,
        max_batch: int = 128,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        torch.set_num_threads(threads)
        self.folder = folder
        self.checkpoint_dir = checkpoint_dir
        self._model = load_model(folder, device=device)
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config: Any = self._model.config

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        eos_ids = eos_ids_of(self._model)
        decoder = decoder_for(self._model)
        self.dtype = compute_dtype(dtype, device)
        self.shares_prefixes: bool = shares_prefixes(self._model)
        """Whether training computes what sequences have in common once; else each is a row of its own."""

        self._trainer = self._trainer_of(self._model)
        max_context = exact_context(config)
        random = np.random.default_rng(seed)
        grammars = Grammars(
            folder / "tokenizer.json", vocabulary=config.vocab_size, end_id=min(eos_ids, default=0)
        )
        # The thread comes after all that may raise: nobody could close it.
        self.host = EngineContext(
            folder=folder,
            thread=EngineThread(),
            make_decoder=lambda model: decoder(model, self.dtype),
            decode=decode,
            random=random,
            max_batch=max_batch,
            device=device,
            max_context=max_context,
            vocabulary=config.vocab_size,
            eos_ids=eos_ids,
            grammars=grammars,
        )

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response together, at most."""
        return self.host.max_context

    @property
    def vocabulary(self) -> int:
        return self.host.vocabulary

    @property
    def architecture(self) -> str:
        """Hugging Face's model type, such as `qwen3`."""
        return self._model.config.model_type

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is unfinished and end the engine's thread."""
        self.host.thread.close()

    def create_training_client(self) -> EmbeddedTrainingClient:
        """The client that trains the engine's own model; all that this returns train the same weights."""
        return EmbeddedTrainingClient(self.host, self._trainer, self.checkpoint_dir)

    def create_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A client that samples from the weights as they are when the engine gets to it."""
        return self.create_training_client().save_weights_and_get_sampling_client()

    def train_copy(
        self, folder: Path | None = None, *, optimizer: bool = False
    ) -> APIFuture[EmbeddedTrainingClient]:
        """A client that trains weights of its own: a copy of the base model's, or those of a checkpoint.

        `optimizer`: with the checkpoint's optimizer state. Raises EngineError for a checkpoint that is of
        another model or has no such state.
        """

        def job() -> EmbeddedTrainingClient:
            trainer = self._trainer_of(self._checked_model(folder or self.folder))
            if optimizer and folder is not None:
                trainer.load_optimizer_state(load_optimizer_state(folder))
            return EmbeddedTrainingClient(self.host, trainer, self.checkpoint_dir)

        return AwaitableConcurrentFuture(self.host.thread.call(job))

    def sample_copy(self, folder: Path | None = None) -> APIFuture[EmbeddedSamplingClient]:
        """A client that samples from the base model on disk, or from a checkpoint."""
        return AwaitableConcurrentFuture(
            self.host.thread.call(lambda: freeze(self.host, self._checked_model(folder or self.folder)))
        )

    def _trainer_of(self, model: Any) -> Trainer:
        return Trainer(model, share_prefixes=self.shares_prefixes, compute_dtype=self.dtype)

    def _checked_model(self, folder: Path) -> Any:
        model = load_model(folder, device=self.host.device)
        mine, other = self._model.config, model.config
        same = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
        differing = [name for name in same if getattr(mine, name, None) != getattr(other, name, None)]
        if differing:
            raise EngineError(f"the checkpoint {folder} is of another model: {', '.join(differing)} differ")
        return model
