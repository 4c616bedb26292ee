"""Three ordinary Inspect AI tasks that a small published chat model can learn. Nothing in them is specific to
training.

    inspect eval examples/smollm2/tasks.py@sums --model mockllm/model

`sums` is answered in a sentence, `formats` asks for a reply of a given form, and `prices` takes two turns,
the first of them to ask. Each takes `split`: "train", or "test" for samples that no training sample repeats.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterable

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, match, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

HOLD_OUT_ONE_IN = 8


def _split(samples: Iterable[Sample], split: str) -> MemoryDataset:
    """The samples of a split, by a fixed hash of their ids, in a fixed shuffled order."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'test'")
    chosen = [
        each
        for each in samples
        if (zlib.crc32(str(each.id).encode()) % HOLD_OUT_ONE_IN == 0) == (split == "test")
    ]
    random.Random(0).shuffle(chosen)
    return MemoryDataset(chosen, name=split)


# Sums


@task
def sums(split: str = "train") -> Task:
    """Add two numbers of 1 to 50; the last number of the reply is the answer.

    Both orders of a pair are one sample, so that no sum of the test split is trained on.
    """
    samples = [
        Sample(id=f"{a}+{b}", input=f"What is {a} + {b}?", target=str(a + b))
        for a in range(1, 51)
        for b in range(a, 51)
    ]
    return Task(
        dataset=_split(samples, split),
        solver=generate(),
        scorer=match(location="end", numeric=True),
        config=GenerateConfig(max_tokens=32),
    )


# Forms of a reply


TOPICS = (
    *("the sun", "rain", "bread", "dogs", "the moon", "music", "rivers", "trees", "winter", "books"),
    *("bees", "coffee", "trains", "snow", "the sea", "gardens", "cheese", "clocks", "birds", "mountains"),
    *("apples", "bridges", "cats", "dreams", "eggs", "fire", "glass", "horses", "islands", "jokes"),
)


def _is_object_with(key: str) -> Callable[[str], bool]:
    def check(reply: str) -> bool:
        try:
            found = json.loads(reply)
        except ValueError:
            return False
        return isinstance(found, dict) and set(found) == {key}

    return check


def _sentences(reply: str) -> int:
    return len(re.findall(r"[.!?](?:\s|$)", reply.strip()))


FORMS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "capitals": ("Use capital letters only.", lambda reply: reply.isupper()),
    "lowercase": ("Use lowercase letters only.", lambda reply: reply.islower()),
    "json": ('Reply with nothing but a JSON object with the key "fact".', _is_object_with("fact")),
    "two sentences": ("Write exactly two sentences.", lambda reply: _sentences(reply) == 2),
    "eight words": ("Use at most eight words.", lambda reply: 2 <= len(reply.split()) <= 8),
    "no comma": ("Use no comma, and at least ten words.", lambda r: "," not in r and len(r.split()) >= 10),
    "ending": (
        'End your reply with the words "That is all."',
        lambda reply: reply.rstrip().endswith("That is all."),
    ),
    "no article": ('Do not use the word "the".', lambda reply: not re.search(r"\bthe\b", reply.lower())),
}
"""Name -> what is asked for, and whether a reply is of that form, as IFEval checks it."""


@scorer(metrics=[accuracy()])
def is_of_form() -> Scorer:
    """Correct for a reply that ends within its tokens, in the form that the target names."""

    async def score(state: TaskState, target: Target) -> Score:
        reply = state.output.completion
        _, check = FORMS[target.text]
        ended = state.output.stop_reason == "stop"
        return Score(value=CORRECT if ended and reply.strip() and check(reply) else INCORRECT, answer=reply)

    return score


@task
def formats(split: str = "train") -> Task:
    """Say something about a topic in a given form."""
    samples = [
        Sample(id=f"{topic}, {name}", input=f"Tell me something about {topic}. {asked}", target=name)
        for topic in TOPICS
        for name, (asked, _) in FORMS.items()
    ]
    return Task(
        dataset=_split(samples, split),
        solver=generate(),
        scorer=is_of_form(),
        config=GenerateConfig(max_tokens=64),
    )


# Two turns with a tool


GOODS = (
    *("lamp", "chair", "kettle", "pencil", "blanket", "mirror", "basket", "hammer", "bicycle", "umbrella"),
    *("guitar", "helmet", "ladder", "bottle", "candle", "pillow", "camera", "wallet", "teapot", "shovel"),
)
COLORS = ("red", "blue", "green", "white", "black", "brown", "yellow", "grey")


def price_of(product: str) -> int:
    """In dollars, from a fixed hash: nobody knows it without asking."""
    return 10 + zlib.crc32(product.encode()) % 90


@solver
def price_list() -> Solver:
    """Answers `Look up: PRODUCT` with that product's price.

    SmolLM2 was not trained to call functions, and its chat template has no tools.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        asked = re.search(r"look up:? (?:the )?(\w+ \w+)", state.output.completion, re.IGNORECASE)
        if asked is None:
            return state
        product = asked[1].lower()
        told = f"The {product} costs {price_of(product)} dollars. {state.input_text.partition('?')[0]}?"
        state.messages.append(ChatMessageUser(content=told))
        return await generate(state)

    return solve


@task
def prices(split: str = "train") -> Task:
    """Look up a price and say it."""
    names = [f"{color} {product}" for color in COLORS for product in GOODS]
    asked = "What is the price of the {}? If you do not know it, write: Look up: {}"
    samples = [Sample(id=name, input=asked.format(name, name), target=str(price_of(name))) for name in names]
    return Task(
        dataset=_split(samples, split),
        solver=price_list(),
        scorer=match(location="end", numeric=True),
        config=GenerateConfig(max_tokens=32),
    )
