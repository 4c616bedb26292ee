"""`Chats`, which `method: sft` trains on or holds out.

No chat is truncated. Replies follow the prompts that the gateway would give. Selection and order depend on
the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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
"""One chat becomes several if the format rewrites earlier turns."""


@dataclass(frozen=True)
class SupervisedExample:
    """A chat, an episode, or a pair of episodes. Trained tokens have weight 1."""

    sequences: Sequence[tinker.Datum]
    about: Hashable
    """Examples with equal `about` are held out together."""

    rejected: Sequence[tinker.Datum] = ()
    episodes: tuple[str, ...] = ()
    """In a pair, the better episode is first."""

    @property
    def datums(self) -> Datums:
        return [*self.sequences, *self.rejected]

    @property
    def origins(self) -> list[dict[str, str]]:
        """`chosen` or `rejected` -> episode uuid, for each of `datums`. Empty for a chat."""
        if not self.episodes:
            return [{}] * len(self.sequences)
        chosen, rejected = {"chosen": self.episodes[0]}, {"rejected": self.episodes[-1]}
        return [chosen] * len(self.sequences) + [rejected] * len(self.rejected)


@dataclass(frozen=True)
class Chats:
    train: Sequence[SupervisedExample]
    held_out: Sequence[SupervisedExample]
    left_out: int
    batch_size: int
    epochs: int
    seed: int
    origin: Mapping[str, object]

    what: str = "chats"
    why_left_out: str = "are too long"

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def longest(self) -> int:
        every = [datum for chat in (*self.train, *self.held_out) for datum in chat.datums]
        return 1 + max(datum.model_input.length for datum in every)

    def batch(self, step: int) -> list[SupervisedExample]:
        """Steps count from 1. Each epoch is reshuffled."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = random.Random(f"{self.seed}/{epoch}").sample(range(len(self.train)), len(self.train))
        chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
        return [self.train[number] for number in chosen]


def divided(
    examples: Sequence[SupervisedExample], config: RunConfig, limit: int, origin: Mapping[str, object]
) -> Chats:
    """Hold out some examples, and leave out sequences of more than `limit` tokens."""
    sft = config.sft
    kept = [each for each in examples if max(datum.model_input.length for datum in each.datums) < limit]
    number = Counter(each.about for each in kept)
    apart = set[Hashable]()
    for subject in random.Random(config.seed).sample(list(number), len(number)):
        if sum(number[each] for each in apart) < sft.held_out:
            apart.add(subject)
    train = [each for each in kept if each.about not in apart]
    if not train:
        raise ConfigError(
            f"sft.held_out: {sft.held_out} chats are to be held out, and {sft.data} has {len(kept)} of at "
            f"most {limit} tokens, about {len(number)} samples: nothing would train"
        )
    settings = {"sft.held_out": sft.held_out, "sft.max_tokens": sft.max_tokens, "seed": config.seed}
    return Chats(
        train=train,
        held_out=[each for each in kept if each.about in apart],
        left_out=len(examples) - len(kept),
        batch_size=sft.batch_size,
        epochs=sft.epochs,
        seed=config.seed,
        origin={**origin, **settings},
    )


def evenly_weighted(datums: Datums) -> Datums:
    total = sum(trained_weight(datum) for datum in datums)
    return [weighted(datum, 1 / total) for datum in datums]


def trained_weight(datum: tinker.Datum) -> float:
    return float(datum.loss_fn_inputs["weights"].to_numpy().sum())


def weighted(datum: tinker.Datum, factor: float) -> tinker.Datum:
    weights = datum.loss_fn_inputs["weights"].to_numpy() * factor
    inputs = {**datum.loss_fn_inputs, "weights": tinker.TensorData.from_numpy(weights.astype("float32"))}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def load_chats(config: RunConfig, model: Path) -> Chats:
    sft, longest = config.sft, context_of(model)
    renderer = ChatRenderer(model, config.engine.chat_template_kwargs)
    data = _read(sft)
    chats = [
        SupervisedExample(_datums(text, renderer, sft, line), about=line) for line, text in _lines(data, sft)
    ]
    origin = {"sha256": hashlib.sha256(data).hexdigest()}
    return divided(chats, config, min(sft.max_tokens or longest, longest), origin)


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
        # splitlines would also split at U+2028 and U+0085, which JSON allows.
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
