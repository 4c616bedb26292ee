"""`Grammars`: which tokens a grammar allows next, computed by llguidance.

Added tokens (such as `<tool_call>`) match only by id, so a constrained string cannot smuggle one in. The
dialect is llguidance's Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerscript.errors import EngineError

try:
    from llguidance import LLMatcher, LLTokenizer
except ImportError:  # Requests that need it get an error.
    LLMatcher = LLTokenizer = None

COMPILED_GRAMMARS = 64


class GrammarError(EngineError):
    pass


class Matcher:
    """Not thread-safe."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [V]. Raises GrammarError if nothing is allowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(np.bool_)
        if not allowed.any():
            raise self._dead_end("it allows no token here")
        return allowed

    def take(self, token: int) -> None:
        """Raises GrammarError for a forbidden token: a mask allows markers that the grammar wants as text."""
        if not self._matcher.consume_token(token):
            raise self._dead_end(f"it expects a text that only the token {token} spells")

    def _dead_end(self, what: str) -> GrammarError:
        # The rest is a kilobyte of the parser's state.
        reason = str(self._matcher.get_error()).partition("\n")[0].strip()
        return GrammarError(f"the grammar cannot be followed to its end: {what} ({reason})")


class Grammars:
    def __init__(self, tokenizer_file: Path, *, vocabulary: int, end_id: int) -> None:
        """`end_id`: any id that ends a turn."""
        self._tokenizer_file = tokenizer_file
        self._vocabulary = vocabulary
        self._end_id = end_id
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """Takes up to a second, without the GIL. Raises GrammarError if `grammar` does not compile."""
        with self._lock:
            compiled = self._compiled.get(grammar) or self._compile(grammar)
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self._vocabulary)

    def _compile(self, grammar: str) -> Any:
        if LLMatcher is None or LLTokenizer is None:
            raise GrammarError("llguidance is not installed; install tinkerscript[engine]")
        if self._tokenizer is None:
            data: dict[str, Any] = json.loads(self._tokenizer_file.read_text(encoding="utf-8"))
            for token in data.get("added_tokens", []):
                token["special"] = True
            self._tokenizer = LLTokenizer(json.dumps(data), n_vocab=self._vocabulary, eos_token=self._end_id)
        compiled = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if compiled.is_error():
            raise GrammarError(str(compiled.get_error()).strip())
        return compiled
