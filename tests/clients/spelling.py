"""`Speller`: text as token ids that the tokenizer itself would not choose.

Invariant: the ids decode to the text, byte for byte, and differ from those that the text encodes to, so that
a path through the text comes back with other ids. The markers of the chat format are their own tokens;
everything between them is cut at random, also inside characters.
"""

from __future__ import annotations

import random
import re

from tinkerscript.tokenizer import LightTokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
TRIES = 100
_AT_MARKERS = re.compile("(" + "|".join(re.escape(marker) for marker in MARKERS) + ")")


class Speller:
    """Spells texts in the pieces of a byte-level vocabulary."""

    def __init__(self, tokenizer: LightTokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._markers = {marker: self._id_of(marker) for marker in MARKERS}
        known = (self._tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
        self._pieces = {
            bytes(piece): token
            for token, piece in enumerate(known)
            if piece is not None and token not in self._markers.values()
        }
        self._longest = max(map(len, self._pieces))

    def spell(self, text: str) -> list[int]:
        """Ids [R] of `text`. Raises ValueError for a text that can be spelled in one way only."""
        usual = self._tokenizer.encode(text)
        for _ in range(TRIES):
            ids = self._spell(text)
            if self._tokenizer.decode(ids) != text:
                raise ValueError(f"the ids of {text!r} decode to {self._tokenizer.decode(ids)!r}")
            if ids != usual:
                return ids
        raise ValueError(f"{TRIES} spellings of {text!r} were all the tokenizer's own")

    def _spell(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _AT_MARKERS.split(text):
            ids += [self._markers[part]] if part in self._markers else self._cut(part.encode())
        return ids

    def _cut(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            fitting = [n for n in range(1, self._longest + 1) if data[:n] in self._pieces and n <= len(data)]
            length = self._rng.choice(fitting)
            ids.append(self._pieces[data[:length]])
            data = data[length:]
        return ids

    def _id_of(self, marker: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(marker)
        if found is None:
            raise ValueError(f"the vocabulary has no {marker}")
        return found
