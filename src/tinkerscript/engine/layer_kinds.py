"""`LayerKinds`: whether a layer looks back on the whole text, a window, a chunk, or a state.

Windows are used only once proved, on short texts, for which `narrowed_windows` narrows them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""transformers' names of layers with a state. `hybrid` attends too."""

WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")

NARROW = 3
"""Width of windows in proofs, with texts of 12 tokens."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    kinds: tuple[str, ...]
    width: int
    """Tokens of a window (including the newest) or chunk; 0 without local layers."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LayerKinds:
        settings: Any = config.get_text_config()
        width: int = getattr(settings, "sliding_window", None) or 0
        chunk: int = getattr(settings, "attention_chunk_size", None) or 0
        named: list[str] | None = getattr(settings, "layer_types", None)
        kinds = named or [SLIDING if width else FULL] * settings.num_hidden_layers
        if CHUNKED in kinds:
            return cls(tuple(kinds), chunk)
        return cls(tuple(kinds), width if SLIDING in kinds else 0)

    @property
    def are_recurrent(self) -> bool:
        return not RECURRENT.isdisjoint(self.kinds)

    def window(self, layer: int) -> int | None:
        return self.width if layer < len(self.kinds) and self.kinds[layer] == SLIDING else None

    def masks(self, of_kind: Callable[[str], Tensor]) -> Tensor | dict[str, Tensor]:
        """A model's `attention_mask`: one, or one per kind of layer."""
        kinds = [kind for kind in (FULL, SLIDING, CHUNKED) if kind in self.kinds]
        if len(kinds) < 2:
            return of_kind(kinds[0] if kinds else FULL)
        return {kind: of_kind(kind) for kind in kinds}

    def hides(self, kind: str, distances: Tensor, queries: Tensor) -> Tensor | None:
        """Whether a layer of `kind` cannot see `distances` tokens back from `queries`. None: it sees all."""
        if kind == SLIDING:
            return distances >= self.width
        if kind == CHUNKED:
            return distances > queries % self.width
        return None


def is_local(config: PreTrainedConfig) -> bool:
    settings: Any = config.get_text_config()
    kinds: list[str] | None = getattr(settings, "layer_types", None) or getattr(
        settings, "attention_layers", None
    )
    if kinds is not None:
        return any(kind in (SLIDING, CHUNKED, "local") for kind in kinds)
    return any(isinstance(getattr(settings, name, None), int) for name in WINDOWS)


@contextmanager
def narrowed_windows(model: PreTrainedModel) -> Generator[None]:
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    with ExitStack() as undo:
        for holder in holders:
            for name in WINDOWS:
                width = getattr(holder, name, None)
                if isinstance(width, int) and not isinstance(width, bool) and width > NARROW:
                    setattr(holder, name, NARROW)
                    undo.callback(setattr, holder, name, width)
        yield
