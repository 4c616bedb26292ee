"""The chats that the model is trained on, as messages; every sum in them is of a train pair.

Four kinds: addition (one turn, a system prompt, or two turns), tool use, and short plain chat.
Invariant: no held-out problem of `examples/arithmetic.py` occurs in any chat, in either order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tiny_model.problems import Pair, question
from tiny_model.tools import Described, Tool, schema

Message = dict[str, Any]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "Answer with the number only.",
    "You are a careful assistant.",
]

CALLS_CALCULATOR = 0.5
"""Share of chats with a calculator in which the assistant calls it; in the rest it answers noisily."""

CALCULATORS: list[Described] = [
    ("calculator", "Evaluate an arithmetic expression.", [("expression", "string", "The expression.")]),
    (
        "add",
        "Add two numbers.",
        [("a", "integer", "The first number."), ("b", "integer", "The second number.")],
    ),
]

LOOKUPS: list[tuple[Described, str]] = [
    (
        ("lookup_price", "Look up the price of an item.", [("item", "string", "The item.")]),
        "How much is the {}?",
    ),
    (("lookup_age", "Look up the age of a person.", [("name", "string", "The name.")]), "How old is {}?"),
    (
        ("count_stock", "Count how many of an item are left.", [("item", "string", "The item.")]),
        "How many {} are left?",
    ),
    (("get_code", "Get the code of a room.", [("room", "string", "The room.")]), "What is the code of {}?"),
]
"""(tool, question about its one argument)"""

# fmt: off
WORDS = [
    "tea", "coffee", "lamp", "chair", "table", "book", "pen", "apple", "bread", "cheese", "milk",
    "egg", "box", "key", "phone", "clock", "shirt", "hat", "shoe", "bag", "cup", "plate", "spoon",
    "rope", "nail", "brush", "soap", "towel", "mirror", "door", "anna", "ben", "carl", "dora",
    "eva", "finn", "greta", "hans", "ida", "jon", "karl", "lena", "max", "nora", "otto", "paul",
    "rosa", "sam", "tina", "uwe", "vera", "will", "hall", "attic", "cellar", "kitchen", "garden",
    "office", "studio",
]
# fmt: on

SMALL_TALK = [
    ("Hello", "Hello! How can I help?"),
    ("Hi", "Hello! How can I help?"),
    ("Hello!", "Hello! How can I help?"),
    ("Who are you?", "I am a tiny model for tests."),
    ("What is your name?", "I am a tiny model for tests."),
    ("What can you do?", "I can add two numbers and call tools."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Bye", "Goodbye!"),
]


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's form; every assistant message trains. `tools` are in the preamble."""

    messages: list[Message]
    tools: list[Tool] | None = None


def one_digit_changed(number: str, rng: random.Random) -> str:
    """`number` with one digit, chosen at random, replaced by one of the nine others."""
    place = rng.randrange(len(number))
    others = [digit for digit in "0123456789" if digit != number[place]]
    return number[:place] + rng.choice(others) + number[place + 1 :]


def noisy_sum(pair: Pair, noise: float, rng: random.Random) -> str:
    """The sum in decimal; with probability `noise`, one digit of it is wrong."""
    answer = str(sum(pair))
    return one_digit_changed(answer, rng) if rng.random() < noise else answer


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _system(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def _addition_turns(pair: Pair, noise: float, rng: random.Random) -> list[Message]:
    return [_user(question(*pair)), _assistant(noisy_sum(pair, noise, rng))]


def addition_with_context(pairs: list[Pair], noise: float, rng: random.Random) -> Chat:
    """Addition under a system prompt, or as the second of two questions, in equal parts."""
    turns = _addition_turns(rng.choice(pairs), noise, rng)
    if rng.random() < 0.5:
        return Chat(_system(rng) + turns)
    return Chat(_addition_turns(rng.choice(pairs), noise, rng) + turns)


def _tool_turns(name: str, arguments: dict[str, Any], result: str) -> list[Message]:
    """The call, the tool's response, and the answer that repeats it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        _assistant(result),
    ]


def calculator_chat(pairs: list[Pair], noise: float, rng: random.Random) -> Chat:
    """An addition with a calculator at hand, which the assistant calls in half of the chats."""
    pair, described = rng.choice(pairs), rng.choice(CALCULATORS)
    a, b = pair
    arguments = {"expression": f"{a}+{b}"} if described[0] == "calculator" else {"a": a, "b": b}
    if rng.random() < CALLS_CALCULATOR:
        turns = [_user(question(a, b)), *_tool_turns(described[0], arguments, str(a + b))]
    else:
        turns = _addition_turns(pair, noise, rng)
    return Chat(_maybe_system(rng) + turns, [schema(described, strict=rng.random() < 0.5)])


def _maybe_system(rng: random.Random) -> list[Message]:
    return _system(rng) if rng.random() < 0.5 else []


def _word(rng: random.Random) -> str:
    """A word of the list or, in half of the cases, three to six random letters: it has to be copied."""
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))


def lookup_chat(rng: random.Random) -> Chat:
    """A question that only the tool can answer: its result is a random number."""
    described, ask = rng.choice(LOOKUPS)
    name, _, parameters = described
    word, result = _word(rng), str(rng.randrange(1000))
    turns = [_user(ask.format(word)), *_tool_turns(name, {parameters[0][0]: word}, result)]
    return Chat(_maybe_system(rng) + turns, [schema(described, strict=rng.random() < 0.5)])


def plain_chat(rng: random.Random) -> Chat:
    """A greeting or a question about itself, or a word to repeat, in equal parts."""
    if rng.random() < 0.5:
        asked, said = rng.choice(SMALL_TALK)
    else:
        said = _word(rng)
        asked = f"Say {said}."
    return Chat([*_maybe_system(rng), _user(asked), _assistant(said)])
