"""The endpoints and request fields of the pinned SDK, for which the Tinker server was written.

A failure here means that the pin moved and the wire with it. Read the difference, serve or refuse what is
new, then write the snapshot anew: `python tests/integration/test_tinker_sdk_drift.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse

from tinkerscript.tinker_api.wire_server import WIRE_ENDPOINTS

SDK = Path(tinker.__file__).parent

SNAPSHOT = Path(__file__).with_name("tinker_sdk_0_38.json")

NOT_SERVED = {
    "audit",
    "auth/token",
    "billing/usage/checkpoints/current",
    "billing/usage/events",
    "copy_weights",
    "create_custom_loss",
    "retrieve_futures",
    "save_weights_external",
    "sessions/search",
    "sessions/{}/project",
    "sessions/{}/trace_export",
    "training_runs/{}/checkpoints/{}/external_weights_urls",
}
"""Endpoints of the service's own business, and those that our client config turns off."""


def sdk_endpoints() -> set[str]:
    """Every `/api/v1/` path in the SDK's sources, with its parameters as {}."""
    found: set[str] = set()
    for path in SDK.rglob("*.py"):
        if path.name.endswith("_test.py") or "/cli/" in str(path):
            continue
        for match in re.finditer(r"[\"'`]/api/v1/([^\"'`\s]+)", path.read_text(encoding="utf-8")):
            found.add(re.sub(r"\{[^}]*\}", "{}", match.group(1)).rstrip("/"))
    return found


def served() -> set[str]:
    paths = {re.sub(r"\{[^}]*\}", "{}", path) for _, path in WIRE_ENDPOINTS}
    return {path.replace("checkpoints/{}/{}", "checkpoints/{}") for path in paths}


def test_every_endpoint_of_the_sdk_is_served_or_known() -> None:
    assert sdk_endpoints() - {"healthz"} == (served() | NOT_SERVED) - {"healthz"}


def field_names(kind: Any) -> list[str]:
    return sorted(f.name for f in fields(kind)) if is_dataclass(kind) else sorted(kind.model_fields)


def request_types() -> Iterator[tuple[str, Any]]:
    for path in sorted((SDK / "types").glob("*_request.py")):
        module = import_module(f"tinker.types.{path.stem}")
        name = "".join(part.capitalize() for part in path.stem.split("_"))
        if hasattr(module, name):
            yield name, getattr(module, name)
    for name in ("AdamParams", "Datum", "LoraConfig", "SamplingParams"):
        yield name, getattr(tinker.types, name)


def snapshot() -> dict[str, Any]:
    """Everything that the wire's shape depends on."""
    messages = pb.DESCRIPTOR.message_types_by_name.values()
    return {
        "endpoints": sorted(sdk_endpoints()),
        "request_fields": {name: field_names(kind) for name, kind in request_types()},
        "client_config": sorted(ClientConfigResponse.model_fields),
        "client_dynamic_config": sorted(ClientDynamicConfigResponse.model_fields),
        "messages": {m.name: {f.name: [f.number, f.type] for f in m.fields} for m in messages},
    }


@pytest.mark.parametrize("part", list(snapshot()))
def test_the_sdk_is_the_one_that_the_server_was_built_for(part: str) -> None:
    assert snapshot()[part] == json.loads(SNAPSHOT.read_text(encoding="utf-8"))[part]


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")
