"""What the scripted model says: an answer for each user message, and for each round of tools after it.

The programs of the clients ask these questions; the tests compare what reached them with these texts.
"""

from __future__ import annotations

import re

from programs.travel import AGAIN, BROKEN, CHOICE, FORCED, OBJECT, PAIR, SHORT, THANKS

COLOURS = "Blue — or teal 🐬."
BROKEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\n</tool_call>'
FINAL = "Lima is warmer by 17.5 °C 🌞."
CHOSEN = "Lima:\n\n  * it's warm\n  * 你好, sea"
BYE = "You're welcome.\tBye"
SORRY = "It was; the JSON never closed."
LIMA = '{"city": "Lima",  "population": 10000000}'

_CALL = "<tool_call>\n{}\n</tool_call>"

# Arguments in spellings that no serialiser would choose: odd spaces, order, escapes, numbers.
_LOOK_UP = (
    _CALL.format('{"name": "get_weather", "arguments": {"city" :  "Malm\\u00f6"}}')
    + "\n"
    + _CALL.format('{"arguments": {"city": "Lima"}, "name": "get_weather"}')
)
_SUBTRACT = _CALL.format('{"name": "difference", "arguments": {"b": 3.50, "a": 2.1e1 }}')

ANSWERS: dict[str, list[str]] = {
    PAIR: [
        f"<think>\nTwo cities: one call each.\n</think>\n\nLet me look.\n\n{_LOOK_UP}",
        f"<think>\n21.0 less 3.5 …\n</think>\n\n{_SUBTRACT}",
        f"<think>\nDone.\n</think>\n\n{FINAL}  \n",
    ],
    CHOICE: [CHOSEN],
    THANKS: [f"<think>\n\n</think>\n\n{BYE}"],
    BROKEN: [BROKEN_CALL],
    AGAIN: [SORRY],
    SHORT: [f"<think>\nAny will do.\n</think>\n\n{COLOURS}"],
    OBJECT: [LIMA],
    FORCED: [_CALL.format('{"name": "get_weather", "arguments": {"city": "Lima"}}'), "Done."],
}

_TURNS = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)


def answer(prompt: str) -> str:
    """What the model says after a rendered prompt. Raises ValueError for a question it does not know."""
    rounds = 0
    for role, content in reversed(_TURNS.findall(prompt)[:-1]):
        if role == "user" and not content.lstrip().startswith("<tool_response>"):
            said = ANSWERS.get(content.strip(), [])
            if rounds >= len(said):
                raise ValueError(f"the story has no answer {rounds} to {content!r}")
            return said[rounds]
        rounds += role == "assistant"
    raise ValueError(f"the prompt asks nothing: {prompt!r}")
