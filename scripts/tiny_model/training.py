"""The model, its supervised training, and how its accuracy on held-out additions is measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_model.data import IGNORED, Sampler, collate, prompts
from tiny_model.problems import split_pairs
from tiny_model.tokenizer import CONTEXT

LEARNING_RATE = 2e-3
WARM_UP = 0.02
"""Share of the training over which the learning rate rises from 0; it then falls linearly to 0."""

ROWS = 32
MOST_TOKENS = 1024
"""Padded tokens in a batch: long tool chats come in batches of fewer rows."""

REPORT_EVERY = 500
"""Steps between two printed losses."""

LONGEST_ANSWER = 4
"""Tokens of the longest right answer: three digits and <|im_end|>."""


@dataclass(frozen=True)
class Budget:
    """Train for `steps` optimizer steps or, where that is None, for `minutes` of wall clock."""

    steps: int | None
    minutes: float

    def clock(self) -> Callable[[int], float]:
        """A function from the steps done to the share of the training that is done, in [0, 1]."""
        started = time.monotonic()
        if self.steps is not None:
            total = self.steps
            return lambda done: done / total
        return lambda _: min(1.0, (time.monotonic() - started) / (60 * self.minutes))


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of about 0.7M parameters with random weights, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _learning_rate(share_done: float) -> float:
    return LEARNING_RATE * min(share_done / WARM_UP, (1 - share_done) / (1 - WARM_UP))


def token_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the tokens that train; ids and labels (B, T)."""
    trains = labels != IGNORED
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
    return F.cross_entropy(model.lm_head(hidden[trains]), labels[trains])


def train(model: Qwen3ForCausalLM, sampler: Sampler, pad: int, budget: Budget) -> list[float]:
    """Train in place; the loss of every step, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    share_done, losses = budget.clock(), []
    for batch in sampler.batches(ROWS, MOST_TOKENS):
        share = share_done(len(losses))
        if share >= 1:
            break
        sampler.noise = sampler.mix.noise_at(share)
        optimizer.param_groups[0]["lr"] = _learning_rate(max(share, 1e-6))
        loss = token_loss(model, *collate(batch, pad))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % REPORT_EVERY == 0:
            recent = sum(losses[-REPORT_EVERY:]) / REPORT_EVERY
            print(f"step {len(losses)}  {share:.0%}  loss {recent:.3f}", flush=True)
    return losses


@dataclass(frozen=True)
class Accuracy:
    """Held-out additions answered exactly, as shares in [0, 1]."""

    temperature_1: float
    """Of `samples` sampled answers, the same number for each problem."""

    temperature_1_expected: float
    """Mean probability of the right answer: the same without sampling noise."""

    greedy: float
    samples: int
    problems: int


@torch.no_grad()
def generate_answers(
    model: Qwen3ForCausalLM, asked: list[list[int]], pad: int, greedy: bool
) -> list[list[int]]:
    """LONGEST_ANSWER tokens after each prompt, greedy or at temperature 1; nothing stops at <|im_end|>."""
    lengths = torch.tensor([len(ids) for ids in asked])
    rows = torch.arange(len(asked))
    ids = torch.full((len(asked), int(lengths.max()) + LONGEST_ANSWER), pad)
    for row, prompt in enumerate(asked):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    for step in range(LONGEST_ANSWER):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[rows, lengths + step - 1]
        logits = model.lm_head(hidden)  # (B, V)
        chosen = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        ids[rows, lengths + step] = chosen
    return [ids[row, n : n + LONGEST_ANSWER].tolist() for row, n in enumerate(lengths.tolist())]


def _share_right(answers: list[list[int]], right: list[list[int]]) -> float:
    hits = [answer[: len(wanted)] == wanted for answer, wanted in zip(answers, right, strict=True)]
    return sum(hits) / len(hits)


@torch.no_grad()
def _expected(model: Qwen3ForCausalLM, asked: list[list[int]], right: list[list[int]], pad: int) -> float:
    """Mean over problems of the probability of the right answer and its <|im_end|>."""
    width = max(len(p) + len(r) for p, r in zip(asked, right, strict=True))
    ids = torch.full((len(asked), width), pad)
    labels = torch.full((len(asked), width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(asked, right, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    logits = model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state)  # (B, T, V)
    nats = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none").sum(1)
    return torch.exp(-nats).mean().item()


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, samples_each: int, seed: int
) -> Accuracy:
    """Accuracy on every held-out problem, with `samples_each` samples of each at temperature 1."""
    torch.manual_seed(seed)
    pairs, pad = split_pairs("test"), tokenizer.pad_token_id
    asked = prompts(tokenizer, pairs)
    right = [[*tokenizer.encode(str(a + b)), tokenizer.eos_token_id] for a, b in pairs]
    sampled = [generate_answers(model, asked, pad, greedy=False) for _ in range(samples_each)]
    return Accuracy(
        temperature_1=_share_right(list(itertools.chain(*sampled)), right * samples_each),
        temperature_1_expected=_expected(model, asked, right, pad),
        greedy=_share_right(generate_answers(model, asked, pad, greedy=True), right),
        samples=samples_each * len(pairs),
        problems=len(pairs),
    )
