"""`Chats`: a JSONL file of chats as tinker_cookbook's supervised datums, some held out.

Invariants: no chat is truncated, and none both trains and is held out. Each reply follows the prompt that the
gateway would give the model. Selection and order depend on the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tinker
import torch
from tinker_cookbook.supervised.common import datum_from_model_input_weights

from tinkerscript.config import RunConfig, SftConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.dialects.chat import read_chat
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import context_of

Datums = list[tinker.Datum]
"""One chat; several datums if the chat format rewrites earlier turns."""


@dataclass(frozen=True)
class Chats:
    train: Sequence[Datums]
    held_out: Sequence[tinker.Datum]
    left_out: int
    """Chats longer than `sft.max_tokens`."""

    batch_size: int
    epochs: int
    seed: int
    origin: Mapping[str, object]
    """The file's `sha256` and the settings that determine the split, for resuming."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def longest(self) -> int:
        every = [datum for chat in self.train for datum in chat] + list(self.held_out)
        return 1 + max(datum.model_input.length for datum in every)

    def batch(self, step: int) -> list[tinker.Datum]:
        """The datums of a step, counted from 1. Each epoch is reshuffled.

        Weights are scaled so that the summed loss is the mean negative log-likelihood per trained token.
        """
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = random.Random(f"{self.seed}/{epoch}").sample(range(len(self.train)), len(self.train))
        chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
        datums = [datum for number in chosen for datum in self.train[number]]
        total = sum(trained_weight(datum) for datum in datums)
        return [_scaled(datum, 1 / total) for datum in datums]


def trained_weight(datum: tinker.Datum) -> float:
    """The number of trained tokens, if each has a weight of 1."""
    return float(datum.loss_fn_inputs["weights"].to_numpy().sum())


def _scaled(datum: tinker.Datum, factor: float) -> tinker.Datum:
    weights = datum.loss_fn_inputs["weights"].to_numpy() * factor
    inputs = {**datum.loss_fn_inputs, "weights": tinker.TensorData.from_numpy(weights.astype("float32"))}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def load_chats(config: RunConfig, model: Path) -> Chats:
    """Render `config.sft.data` in the model's chat format. Raises ConfigError with the line and the
    problem."""
    sft, longest = config.sft, context_of(model)
    limit = min(sft.max_tokens or longest, longest)
    renderer = ChatRenderer(model, config.engine.chat_template_kwargs)
    data = _read(sft)
    chats = [_datums(text, renderer, sft, line) for line, text in _lines(data, sft)]
    kept = [datums for datums in chats if max(d.model_input.length for d in datums) < limit]
    if len(kept) <= sft.held_out:
        raise ConfigError(
            f"sft.held_out: {sft.held_out} chats are to be held out, but {sft.data} has {len(kept)} of at "
            f"most {limit} tokens"
        )
    order = random.Random(config.seed).sample(range(len(kept)), len(kept))
    return Chats(
        train=[kept[i] for i in sorted(order[sft.held_out :])],
        held_out=[datum for i in sorted(order[: sft.held_out]) for datum in kept[i]],
        left_out=len(chats) - len(kept),
        batch_size=sft.batch_size,
        epochs=sft.epochs,
        seed=config.seed,
        origin={
            "sha256": hashlib.sha256(data).hexdigest(),
            "sft.held_out": sft.held_out,
            "sft.max_tokens": sft.max_tokens,
            "seed": config.seed,
        },
    )


def _read(sft: SftConfig) -> bytes:
    if not sft.data:
        raise ConfigError("sft.data is needed for method: sft; give a JSONL file of chats")
    path = Path(sft.data).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"sft.data: cannot read {path}: {error}") from error


def _lines(data: bytes, sft: SftConfig) -> list[tuple[int, str]]:
    try:
        # splitlines would also split at U+2028 and U+0085, which JSON strings may contain.
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"sft.data: cannot read {sft.data}: {error}") from error
    return [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]


def _datums(text: str, renderer: ChatRenderer, sft: SftConfig, line: int) -> Datums:
    sequences: list[tuple[list[int], list[int]]] = []
    sampled: list[int] = []
    seen = 0
    try:
        messages, tools = read_chat(text.encode())
    except GatewayError as error:
        raise _wrong(sft, line, error.message.replace("the request body", "the line")) from error
    try:
        for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            new, (ids, weights) = None, sequences[-1] if sequences else ([], [])
            if seen:
                prompt, history = ids[: len(ids) - len(sampled)], messages[:seen]
                new = renderer.extend(prompt, sampled, messages[seen:index], tools, history.copy)
            if new is None:
                new, ids, weights = renderer.render(messages[:index], tools), [], []
                sequences.append((ids, weights))
            sampled = renderer.reply_ids(messages[:index], messages[index], tools)
            ids += new + sampled
            weights += [0] * len(new) + [1] * len(sampled)
            seen = index + 1
    except (GatewayError, ValueError) as error:
        raise _wrong(sft, line, f"the chat format cannot render it: {error}") from error
    if not sequences:
        raise _wrong(sft, line, "it has no assistant reply to train on")
    return [
        datum_from_model_input_weights(tinker.ModelInput.from_ints(ids), torch.tensor(weights))
        for ids, weights in sequences
    ]


def _wrong(sft: SftConfig, line: int, what: str) -> ConfigError:
    return ConfigError(f"sft.data: {sft.data}, line {line}: {what}")
