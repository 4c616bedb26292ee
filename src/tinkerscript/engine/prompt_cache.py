"""`PromptCache`: prefilled prompts of one set of weights, so that a group's prompt is computed once.

The members of a group ask for the same prompt within milliseconds, but seldom in the same step. Least
recently used prompts go first; the bound is in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What decoding needs of a prompt of P tokens."""

    logits: Tensor
    """(V,): after the last token."""

    keys: list[Tensor]
    """Per layer (kv_heads, P, head_dim)."""

    values: list[Tensor]
    """Per layer (kv_heads, P, head_dim)."""


class PromptCache:
    """Keeps at most `max_tokens` prompt tokens. Not thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: OrderedDict[Prompt, Prefilled] = OrderedDict()

    def get(self, prompt: Prompt) -> Prefilled | None:
        found = self._prompts.get(prompt)
        if found is not None:
            self._prompts.move_to_end(prompt)
        return found

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of `prompts` that are not here, each once."""
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]

    def put(self, prompt: Prompt, prefilled: Prefilled) -> None:
        self._prompts[prompt] = prefilled
        self._tokens += len(prompt)

    def trim(self) -> None:
        """Forget the least recently used prompts until the bound holds."""
        while self._tokens > self._max_tokens:
            prompt, _ = self._prompts.popitem(last=False)
            self._tokens -= len(prompt)
