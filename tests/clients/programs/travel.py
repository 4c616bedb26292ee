"""The two tools that every program gives its model, and what it asks."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

PAIR = "What is the weather in Malmö and in Lima?"
CHOICE = "Which of the two should I visit?"
THANKS = "Thank you!"
BROKEN = "Look up the weather in Oslo."
AGAIN = "That call was malformed. Say so."
SHORT = "Name a color."
OBJECT = "Describe Lima as JSON."
FORCED = "Call a tool for Lima."

SYSTEM = "You help travellers. Use the tools."
CONVERSATION = (PAIR, CHOICE, THANKS)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Malmö": "3.5 °C", "Lima": "21.0 °C"}[city]


def difference(a: float, b: float) -> float:
    """a minus b."""
    return a - b


class City(BaseModel):
    """A city."""

    city: str
    population: int


FUNCTIONS = {"get_weather": get_weather, "difference": difference}

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBERS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LIMA_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": CITY_SCHEMA, "difference": NUMBERS_SCHEMA}

CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": function.__doc__, "parameters": SCHEMAS[name]},
    }
    for name, function in FUNCTIONS.items()
]


def call(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a tool; its result as text."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(FUNCTIONS[name](**given))
