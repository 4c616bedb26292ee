"""`Host`: what all clients of one embedded engine share.

The base model's limits are those of every run and sampler: they differ in weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from tinkerscript.engine.batch import Decode
from tinkerscript.engine.constraints import Grammars
from tinkerscript.engine.decoder import Decoder
from tinkerscript.engine.worker_thread import EngineThread
from tinkerscript.errors import EngineRequestError


@dataclass(frozen=True, slots=True)
class Host:
    """One base model's limits and the thread that owns torch."""

    folder: Path
    """Where the base model and its tokenizer are."""

    thread: EngineThread
    make_decoder: Callable[[PreTrainedModel], Decoder]
    decode: Decode
    random: np.random.Generator
    max_batch: int
    device: str

    max_context: int
    """Tokens of prompt and response together, at most."""

    vocabulary: int
    eos_ids: frozenset[int]
    grammars: Grammars
    """Constraints over this model's vocabulary."""

    def checked_prompt(self, ids: list[int], *, room: int) -> list[int]:
        """The prompt, if `room` tokens more fit after it. Raises EngineRequestError."""
        if not ids:
            raise EngineRequestError("prompt: the prompt is empty")
        if len(ids) + room > self.max_context:
            raise EngineRequestError(
                f"prompt: the prompt has {len(ids)} tokens; the context holds {self.max_context}"
            )
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise EngineRequestError(f"prompt: the prompt has ids outside [0, {self.vocabulary})")
        return ids


def eos_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """End-of-text ids from the generation config, else the model's own."""
    configured: Any = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = model.config.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)
