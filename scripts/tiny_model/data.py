"""From chats to batches of token ids: which tokens train, and how sequences are bucketed by length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tiny_model.chats import Chat, addition_with_context, calculator_chat, lookup_chat, noisy_sum, plain_chat
from tiny_model.problems import Pair, question, split_pairs

IGNORED = -100
"""Label of a token that does not train."""

BUCKET_BATCHES = 20
"""Batches' worth of sequences that are drawn together, sorted by length and cut into batches."""

POOL = 12000
"""Sequences other than plain addition that are rendered once and drawn from with replacement."""


@dataclass(frozen=True)
class Mix:
    """What one training sequence is. The first four are shares and add up to 1."""

    addition: float = 0.86
    addition_in_context: float = 0.04
    tools: float = 0.06
    plain_chat: float = 0.04
    noise: float = 0.60
    """Probability that an answer to an addition has one wrong digit, once the labels turn noisy."""
    noisy_after: float = 0.85
    """Share of the training after which the labels of plain additions are noisy; before, all are right."""

    def noise_at(self, share_done: float) -> float:
        """The noise of plain additions when `share_done` of the training is done."""
        return self.noise if share_done >= self.noisy_after else 0.0

    def as_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Sequence:
    """`ids[i]` trains when `trains[i]`: what an assistant message samples, its <|im_end|> included."""

    ids: list[int]
    trains: list[bool]


def render(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> Sequence:
    """A chat as the template writes it, with the assistant's own tokens marked."""
    ids = list(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, return_dict=False))
    header = tokenizer.encode("<|im_start|>assistant\n")
    trains, inside = [False] * len(ids), False
    for i, token in enumerate(ids):
        trains[i] = inside
        inside = (inside and token != tokenizer.eos_token_id) or ids[i + 1 - len(header) : i + 1] == header
    return Sequence(ids, trains)


def prompts(tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> list[list[int]]:
    """The ids of "What is a+b?" with the generation prompt, for each pair."""
    chats = [[{"role": "user", "content": question(*pair)}] for pair in pairs]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


class Sampler:
    """Draws training sequences of a mix; the same seed draws the same sequences.

    `noise` is that of the plain additions drawn from now on; the trainer sets it as the training goes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mix: Mix, seed: int, pool: int = POOL) -> None:
        self._rng = random.Random(seed)
        self._tokenizer, self.mix = tokenizer, mix
        self.noise = mix.noise_at(0.0)
        self._pairs = split_pairs("train")
        self._prompts: dict[Pair, list[int]] = {}
        self._digits = {digit: tokenizer.encode(digit) for digit in "0123456789"}
        self._pool = [render(tokenizer, self._other_chat()) for _ in range(pool)]

    def _other_chat(self) -> Chat:
        mix, rng = self.mix, self._rng
        kinds = ["addition_in_context", "tools", "plain_chat"]
        kind = rng.choices(kinds, [mix.addition_in_context, mix.tools, mix.plain_chat])[0]
        if kind == "addition_in_context":
            return addition_with_context(self._pairs, mix.noise, rng)
        if kind == "plain_chat":
            return plain_chat(rng)
        return calculator_chat(self._pairs, mix.noise, rng) if rng.random() < 0.5 else lookup_chat(rng)

    def _prompt(self, pair: Pair) -> list[int]:
        if pair not in self._prompts:
            self._prompts[pair] = prompts(self._tokenizer, [pair])[0]
        return self._prompts[pair]

    def draw(self) -> Sequence:
        if self._rng.random() >= self.mix.addition:
            return self._rng.choice(self._pool)
        pair = self._pairs[self._rng.randrange(len(self._pairs))]
        answer, prompt = noisy_sum(pair, self.noise, self._rng), self._prompt(pair)
        response = [token for digit in answer for token in self._digits[digit]]
        response.append(self._tokenizer.eos_token_id)
        return Sequence(prompt + response, [False] * len(prompt) + [True] * len(response))

    def batches(self, rows: int, most_tokens: int) -> Iterator[list[Sequence]]:
        """Batches of up to `rows` sequences of like length and `most_tokens` padded tokens, without end."""
        while True:
            drawn = sorted((self.draw() for _ in range(rows * BUCKET_BATCHES)), key=lambda s: len(s.ids))
            batches = list(_cut(drawn, rows, most_tokens))
            self._rng.shuffle(batches)
            yield from batches


def _cut(ascending: list[Sequence], rows: int, most_tokens: int) -> Iterator[list[Sequence]]:
    batch: list[Sequence] = []
    for sequence in ascending:
        if batch and (len(batch) == rows or (len(batch) + 1) * len(sequence.ids) > most_tokens):
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def collate(batch: list[Sequence], pad: int) -> tuple[Tensor, Tensor]:
    """ids (B, T), padded on the right, and labels (B, T): the next token where it trains, else IGNORED."""
    width = max(len(sequence.ids) for sequence in batch)
    ids = torch.full((len(batch), width), pad)
    labels = torch.full((len(batch), width), IGNORED)
    for row, sequence in enumerate(batch):
        length = len(sequence.ids)
        ids[row, :length] = torch.tensor(sequence.ids)
        targets = [t if trains else IGNORED for t, trains in zip(sequence.ids, sequence.trains, strict=True)]
        labels[row, : length - 1] = torch.tensor(targets[1:])
    return ids, labels
