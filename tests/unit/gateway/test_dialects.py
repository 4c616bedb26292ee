"""The table of dialects: what follows from an entry, and what adding one takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway_bench import Bench
from tinkerscript.errors import GatewayError
from tinkerscript.gateway import named_model
from tinkerscript.gateway.dialects import DIALECTS, REFUSAL_BODIES
from tinkerscript.gateway.dialects.dialect import (
    Completion,
    EventStream,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.openai import OpenAIDialect


class Plain(OpenAIDialect[ModelCall]):
    """A prompt as the body, the reply's text back: a dialect of a user's own."""

    path = "/v1/plain"

    def parse(self, body: bytes) -> ModelCall:
        if not body:
            raise GatewayError(400, "invalid_value", "the body is empty; send a prompt")
        message = {"role": "user", "content": body.decode()}
        return ModelCall(model="policy", messages=[message], tools=[], parse_tool_calls=False)

    def reply(self, call: ModelCall, completion: Completion) -> dict[str, Any]:
        return {"text": completion.choices[0].message["content"]}

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        raise AssertionError("parse never asks for a stream")


@pytest.fixture
def bench(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(named_model, "DIALECTS", (*DIALECTS, Plain))
    return Bench(byte_model)


async def test_a_dialect_is_one_class_and_one_entry_in_the_table(bench: Bench) -> None:
    response = await bench.client.post("/v1/plain", content=b"hi")
    assert response.json() == {"text": "hello"}
    assert len(bench.claims.recorded) == 1
    refused = await bench.client.post("/v1/plain", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert bench.app.openapi()["paths"]["/v1/plain"]["post"]["description"] == Plain.__doc__


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_has_the_shape_of_the_dialects_errors(dialect: Any) -> None:
    prefix = next(prefix for prefix in REFUSAL_BODIES if dialect.path.startswith(prefix))
    assert REFUSAL_BODIES[prefix](413, "too long") == dialect.error_body(413, "too long")
