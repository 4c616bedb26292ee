"""`/openapi.json`: every endpoint, every parameter and every field of a request or a reply is described."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interchange_helpers import run_config
from tinkerscript.access_tokens import Roles
from tinkerscript.ledger import Ledger
from tinkerscript.server.app import create_server

ENDPOINTS = {
    *("/abort_episode", "/can_continue_episode", "/claim_episode", "/end_episode", "/heartbeat_episode"),
    *("/register_episode", "/get_engine_status", "/update_engine_status", "/sync_train_config"),
    *("/get_episode_buffer", "/failed_episodes", "/failed_episodes/retry", "/failed_episodes/drop"),
    *("/health", "/ready", "/metrics", "/v1/chat/completions", "/v1/models"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
}
"""Endpoints that must be there; others are checked as well."""


@pytest.fixture
async def schema(tmp_path: Path, byte_model: Path, ledger: Ledger) -> AsyncIterator[dict[str, Any]]:
    server = await create_server(run_config(byte_model), tmp_path, ledger=ledger, roles=Roles())
    yield server.api.openapi()
    server.link.close()


def test_every_endpoint_is_described(schema: dict[str, Any]) -> None:
    assert schema["paths"].keys() >= ENDPOINTS
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description", "").strip(), f"{method} {path}"
            for parameter in operation.get("parameters", []):
                assert parameter.get("description"), f"{method} {path} {parameter['name']}"


def test_every_field_is_described(schema: dict[str, Any]) -> None:
    models = {name: each for name, each in schema["components"]["schemas"].items() if "properties" in each}
    assert "claim_request_id" in models["ClaimEpisodeRequest"]["properties"]
    undescribed = [name for name, model in models.items() if not model.get("description", "").strip()]
    undescribed += [
        f"{name}.{field}"
        for name, model in models.items()
        for field, each in model["properties"].items()
        if not each.get("description", "").strip()
    ]
    assert not undescribed
