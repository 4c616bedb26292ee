"""docs/protocol.md is true: its examples, in their order, against a real server with a trainer on its link.

An example is a block of four parts between empty lines: request line and headers, the request's JSON, the
status, the reply's JSON. In a reply "…" stands for any value and for any end of a string; `{name}` in a
request for the last value under that name in a reply. Without a reply's JSON the status alone is checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from interchange_helpers import FAST, run_config, trainer
from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.messages import BatchProgress

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
ANY = "…"
BATCH = BatchProgress(
    label="step 4",
    rule="groups",
    needed=2,
    have=1,
    episodes_ended=9,
    episodes_expected=9,
    groups_ahead={"shared": 1},
)


@dataclass(frozen=True)
class Example:
    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int
    reply: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def read_examples(text: str) -> list[Example]:
    blocks = re.findall(r"^```http\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [_example(block.strip().split("\n\n")) for block in blocks]


def _example(parts: list[str]) -> Example:
    request, *headers = parts[0].splitlines()
    method, path = request.split()
    body = parts[1] if method == "POST" else ""
    status, *reply = parts[2:] if method == "POST" else parts[1:]
    return Example(
        method,
        path,
        dict(line.split(": ", 1) for line in headers),
        body,
        int(status.split()[0]),
        json.loads(reply[0]) if reply else None,
    )


def differences(expected: Any, actual: Any, where: str = "reply") -> list[str]:
    """Where the reply is not what the document says."""
    if expected == ANY:
        return []
    if isinstance(expected, str) and expected.endswith(ANY) and isinstance(actual, str):
        return [] if actual.startswith(expected[:-1]) else [f"{where}: {actual!r}, not {expected!r}"]
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys():
            return [f"{where}: has {sorted(actual)}, not {sorted(expected)}"]
        return [
            line for key in expected for line in differences(expected[key], actual[key], f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [] if expected == actual else [f"{where}: {actual!r}, not {expected!r}"]


def remember(value: Any, known: dict[str, str]) -> None:
    """Keep the strings of a reply under their names."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str) and item:
                known[key] = item
            remember(item, known)
    elif isinstance(value, list):
        for item in value:
            remember(item, known)


def filled(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: known[match[1]], text)


async def test_every_example_runs_as_it_is_written_and_every_endpoint_has_one(
    tmp_path: Path, byte_model: Path
) -> None:
    examples = read_examples(DOCUMENT.read_text(encoding="utf-8"))
    sampler = ScriptedSampler(lambda prompt: list(b"46"), policy_version=3)
    config = run_config(byte_model, max_attempts=1)
    known: dict[str, str] = {}
    async with (
        running_server(config, tmp_path, environ={}, times=FAST) as (info, _),
        trainer(info.link_address, sampler.sample) as link,
        httpx.AsyncClient(base_url=info.url, timeout=30) as http,
    ):
        link.set_status(policy_version=3, global_step=3, engine_status="ENGINE.ROLLING")
        link.set_batch(BATCH, at_once=True)
        await link.resume([])
        for example in examples:
            headers = {"Content-Type": "application/json"}
            headers |= {name: filled(value, known) for name, value in example.headers.items()}
            body = filled(example.body, known) or None
            reply = await http.request(example.method, example.path, headers=headers, content=body)
            assert reply.status_code == example.status, f"{example}: {reply.text}"
            if reply.headers["content-type"] != "application/json":
                continue
            data = reply.json()
            remember(data, known)
            if example.reply is not None:
                assert not (problems := differences(example.reply, data)), f"{example}: {problems}"
        served = (await http.get("/openapi.json")).json()["paths"]
    shown = {(example.method, example.path.partition("?")[0]) for example in examples}
    for template, methods in served.items():
        for method in methods:
            has_one = any(method.upper() == other and _is_of(path, template) for other, path in shown)
            assert has_one, f"docs/protocol.md has no example of {method} {template}"


def _is_of(path: str, template: str) -> bool:
    return re.fullmatch(re.sub(r"{\w+}", "[^/]+", template.removeprefix(AGENT_PREFIX)), path) is not None
