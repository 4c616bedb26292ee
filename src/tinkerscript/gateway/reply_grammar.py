"""`constraint_of` writes a request's requirements on the reply as a grammar over token ids.

`ChatRenderer.parse` reads every complete reply of the grammar as required. In llguidance's Lark dialect,
`<[7]>` is the token with id 7.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.rendering import Markers
from tinkerscript.sampler import Constraint

WHITE_SPACE = r"[ \n\r\t]{1,40}"  # Models may sample white space forever.


JsonSchema = dict[str, Any]


def constraint_of(call: ModelCall, markers: Markers | None, stop_ids: Sequence[int]) -> Constraint | None:
    asked_by = _asked_by(call)
    if asked_by is None:
        return None
    if markers is None and (call.required_tools or call.json_schema is None):
        message = f"{asked_by} is not supported for this model's chat format; leave it out"
        raise GatewayError(400, "unsupported_parameter", message, param=asked_by)
    return Constraint(grammar=_grammar(call, markers, stop_ids), asked_by=asked_by)


def is_constrained(call: ModelCall) -> bool:
    return _asked_by(call) is not None


def _asked_by(call: ModelCall) -> str | None:
    if call.required_tools:
        return call.FIELD_NAMES["required_tools"]
    if call.json_schema is not None:
        return call.FIELD_NAMES["json_schema"]
    if call.parse_tool_calls and not call.parallel_tool_calls:
        return call.FIELD_NAMES["parallel_tool_calls"]
    return None


def _grammar(call: ModelCall, markers: Markers | None, stop_ids: Sequence[int]) -> str:
    lines = [
        "end: " + " | ".join(f"<[{token}]>" for token in stop_ids),
        "TEXT: /(.|\\n)*/",
        "WS: /[ \\n]{0,4}/",
    ]
    replies: list[str] = []
    if call.json_schema is not None and not call.required_tools:
        lines.append(f"json: %json {_schema(call.json_schema)}")
        replies.append("WS json WS")
    if markers is not None and call.parse_tool_calls:
        lines += _tool_lines(call, markers)
        replies.append("calls")
        if not replies[:-1] and not call.required_tools:
            replies = ["TEXT calls?"]
    opening = ""
    if markers is not None:
        lines.append(f"reasoning: <[{markers.think}]> TEXT <[{markers.think_end}]>")
        opening = "(WS reasoning)? WS "
    return "\n".join([f"start: {opening}({' | '.join(replies)}) end", *lines])


def _tool_lines(call: ModelCall, markers: Markers) -> list[str]:
    tools = [tool["function"] for tool in call.tools]
    allowed = [tool for tool in tools if not call.required_tools or tool["name"] in call.required_tools]
    lines: list[str] = []
    for number, tool in enumerate(allowed):
        opening = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
        lines.append(f'tool{number}: {opening} args{number} "}}"')
        lines.append(f"args{number}: %json {_schema(_object(tool.get('parameters')))}")
    names = " | ".join(f"tool{number}" for number in range(len(allowed)))
    more = '("\\n" call)*' if call.parallel_tool_calls else ""
    lines.append(f'call: <[{markers.tool_call}]> "\\n" ({names}) "\\n" <[{markers.tool_call_end}]>')
    lines.append(f"calls: call {more}")
    return lines


def _object(parameters: JsonSchema | None) -> JsonSchema:
    parameters = parameters or {}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _schema(schema: JsonSchema) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})
