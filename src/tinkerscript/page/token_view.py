from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence
from tinkerscript.model_folder import model_folder
from tinkerscript.page.episode_view import recorded_sequences
from tinkerscript.rollouts.rollout import Rollout
from tinkerscript.tokenizer import LightTokenizer

SHOWN_TOKENS = 8192

Numbers = list[float | None]


class Tokens(BaseModel):
    """The tokens [start, end) of a sequence, in lists of that length.

    A number is null where it does not apply, and a list is null if it was not recorded.
    """

    sequence: int
    length: int = Field(description="Length of the whole sequence.")
    start: int
    end: int
    step: int | None = Field(
        description="The step of the trainer's numbers; null if no step used the sequence."
    )
    ids: list[int]
    texts: list[str] = Field(
        description="A character that spans several tokens is the text of the last one; the others are empty."
    )
    sampled: list[bool]
    uses: list[str | None] = Field(
        description="How training used each sampled token: trained, constrained, corrected, left_out."
    )
    reason: str | None = Field(description="Why the sequence did not train.")
    versions: list[int | None] = Field(description="Policy version that sampled each token.")
    calls: list[int | None] = Field(description="Number of the call that sampled each token, from 0.")
    logprobs: Numbers = Field(description="The sampler's log probabilities.")
    trainer_logprobs: Numbers | None
    entropies: Numbers | None = Field(description="Entropy of the trainer's distribution in nats.")
    advantages: Numbers | None


def token_view(
    ledger: LedgerReader,
    uuid: str,
    sequence: int,
    *,
    start: int = 0,
    end: int | None = None,
    step: int | None = None,
) -> Tokens:
    """`step` is by default the last that used them."""
    recorded = recorded_sequences(ledger, uuid)
    if recorded is None:
        raise NotRecordedError(f"the tokens of episode {uuid!r} are not recorded")
    found, steps = recorded
    if not 0 <= sequence < len(found):
        raise NotRecordedError(f"episode {uuid!r} has {len(found)} sequences, numbered from 0")
    at = step if step is not None else max(steps, default=None)
    rollout, trained = found[sequence].rollout, found[sequence].used_in(steps.get(at or 0, []))
    length = len(rollout.tokens)
    start = min(max(0, start), length)
    end = min(length if end is None else max(start, end), start + SHOWN_TOKENS, length)
    return _tokens(rollout, sequence, trained, at if trained else None, start, end, ledger.model())


def _tokens(
    rollout: Rollout,
    sequence: int,
    trained: TrainedSequence | None,
    step: int | None,
    start: int,
    end: int,
    model: str,
) -> Tokens:
    sampled = rollout.sampled
    span = slice(start, end)
    versions = np.full(len(sampled), -1)
    calls = np.full(len(sampled), -1)
    for number, segment in enumerate(rollout.segments):
        for version, part in segment.versions:
            versions[part] = version
        calls[segment.start : segment.end] = number

    def placed(data: bytes, kind: str) -> Numbers | None:
        # Values exist only for sampled tokens.
        if not data:
            return None
        out = np.full(len(sampled), np.nan)
        out[sampled] = np.frombuffer(data, kind).astype(np.float64)
        return _rounded(out[span])

    uses = placed(trained.uses, "u1") if trained else None
    names = [use.name.lower() for use in TokenUse]
    return Tokens(
        sequence=sequence,
        length=len(sampled),
        start=start,
        end=end,
        step=step,
        ids=rollout.tokens[span].tolist(),
        texts=pieces(model, rollout.tokens.tolist(), start, end),
        sampled=sampled[span].tolist(),
        uses=[None if use is None else names[int(use)] for use in uses or [None] * (end - start)],
        reason=(trained.reason or None) if trained else None,
        versions=_known(versions[span]),
        calls=_known(calls[span]),
        logprobs=_rounded(np.where(sampled, rollout.logprobs.astype(np.float64), np.nan)[span]),
        trainer_logprobs=placed(trained.trainer_logprobs, "<f4") if trained else None,
        entropies=placed(trained.entropies, "<f2") if trained else None,
        advantages=placed(trained.advantages, "<f4") if trained else None,
    )


def _rounded(values: npt.NDArray[np.float64]) -> Numbers:
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]


def _known(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int | None]:
    return [None if value < 0 else value for value in values.tolist()]


@lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> LightTokenizer:
    return LightTokenizer(folder)


def pieces(model: str, ids: list[int], start: int, end: int) -> list[str]:
    """Return the texts of tokens [start, end).

    Refuses a model at a URL, which a foreign run folder could name.
    """
    if "://" in model:
        raise NotRecordedError(f"the page fetches no tokenizer from {model}")
    tokenizer = _tokenizer(model_folder(model))
    texts: list[str] = []
    begin = max(0, start - 8)  # A character takes up to four tokens; some decoders look back.
    pending: list[int] = []
    for place in range(begin, end):
        pending.append(ids[place])
        text = _text(tokenizer, ids[place], pending)
        if text is None and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text if text is not None else tokenizer.decode(pending))
        pending = []
    if pending and end == len(ids):  # The sequence ends mid-character.
        texts[-1] = tokenizer.decode(pending)
    return texts[start - begin :]


def _text(tokenizer: LightTokenizer, token: int, pending: list[int]) -> str | None:
    """Decode `pending`, which ends with `token`. Returns None mid-character."""
    parts = [tokenizer.token_bytes(each) for each in pending]
    if any(part is None for part in parts):
        return tokenizer.piece_text(token)
    try:
        return b"".join(bytes(part) for part in parts if part is not None).decode()
    except UnicodeDecodeError as error:
        return None if error.reason == "unexpected end of data" else tokenizer.decode(pending)
