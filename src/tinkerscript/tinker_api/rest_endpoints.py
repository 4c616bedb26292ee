"""What the SDK's REST client asks: runs, checkpoints, sessions and samplers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from tinkerscript.errors import WireError
from tinkerscript.tinker_api.checkpoints import Checkpoint
from tinkerscript.tinker_api.endpoint import Endpoint, Reply, post, read
from tinkerscript.tinker_api.sessions import RunRecord
from tinkerscript.tinker_api.state import WireState


class WeightsInfoRequest(BaseModel):
    """Body of `weights_info`; the SDK has no type for it."""

    tinker_path: str


class TtlRequest(BaseModel):
    """Body of a checkpoint's `ttl`; the SDK has no type for it."""

    ttl_seconds: int | None = None


async def weights_info(state: WireState, request: WeightsInfoRequest) -> Reply:
    checkpoint = state.checkpoints.find(request.tinker_path, field="tinker_path")
    return {"base_model": checkpoint.base_model, "is_lora": False, "lora_rank": None}


async def get_sampler(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    record = state.sessions.sampler(request.path_params["sampler_id"])[1]
    return {"sampler_id": record.sampler_id, "base_model": record.base_model, "model_path": record.model_path}


async def get_session(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    session = state.sessions.get(request.path_params["session_id"])
    return {
        "training_run_ids": list(session.runs),
        "sampler_ids": list(session.samplers),
        "user_metadata": _texts(session.user_metadata),
        "display_name": session.display_name,
    }


async def list_sessions(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    page, _ = _page(request, [session.session_id for session in state.sessions.all()])
    return {"sessions": page}


async def get_training_run(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    return _run(state, state.sessions.run(request.path_params["run_id"])[1])


async def list_training_runs(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    records = [record for session in state.sessions.all() for record in session.runs.values()]
    page, cursor = _page(request, sorted(records, key=lambda r: r.last_request, reverse=True))
    return {"training_runs": [_run(state, record) for record in page], "cursor": cursor}


def _run(state: WireState, record: RunRecord) -> dict[str, Any]:
    checkpoints = state.checkpoints.all(record.run_id)
    newest = {c.kind: state.checkpoints.as_reply(c) for c in reversed(checkpoints)}
    return {
        "training_run_id": record.run_id,
        "base_model": record.base_model,
        "model_owner": "local",
        "is_lora": False,
        "last_request_time": record.last_request,
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": None if record.user_metadata is None else _texts(record.user_metadata),
    }


async def list_run_checkpoints(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    found = state.checkpoints.all(request.path_params["run_id"])
    return {"checkpoints": [state.checkpoints.as_reply(checkpoint) for checkpoint in found], "cursor": None}


async def list_checkpoints(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    page, cursor = _page(request, state.checkpoints.all())
    return {"checkpoints": [state.checkpoints.as_reply(each) for each in page], "cursor": cursor}


async def delete_checkpoint(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    checkpoint = _named(state, request)
    state.checkpoints.delete(checkpoint)
    state.forget_path(checkpoint.path)
    return None


async def set_ttl(state: WireState, request: Request, body: bytes) -> Reply:
    state.checkpoints.set_ttl(_named(state, request), read(TtlRequest, body).ttl_seconds)
    return None


async def publish(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    state.checkpoints.set_public(_named(state, request), public=True)
    return None


async def unpublish(state: WireState, request: Request, body: bytes) -> Reply:
    del body
    state.checkpoints.set_public(_named(state, request), public=False)
    return None


def _named(state: WireState, request: Request) -> Checkpoint:
    parts = request.path_params
    return state.checkpoints.find(f"tinker://{parts['run_id']}/{parts['kind']}/{parts['name']}")


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    values: dict[str, int] = {}
    for name, default in (("limit", 100), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdigit():
            raise WireError(400, f"{name}: {text!r} is not a number of items")
        values[name] = int(text)
    offset, limit = values["offset"], values["limit"]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _texts(metadata: dict[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else str(value) for key, value in metadata.items()}


_CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"


CALLS = [
    post("weights_info", WeightsInfoRequest, weights_info),
    Endpoint("GET", "samplers/{sampler_id}", get_sampler),
    Endpoint("GET", "sessions", list_sessions),
    Endpoint("GET", "sessions/{session_id}", get_session),
    Endpoint("GET", "training_runs", list_training_runs),
    Endpoint("GET", "training_runs/{run_id}", get_training_run),
    Endpoint("GET", "training_runs/{run_id}/checkpoints", list_run_checkpoints),
    Endpoint("GET", "checkpoints", list_checkpoints),
    Endpoint("DELETE", _CHECKPOINT, delete_checkpoint),
    Endpoint("PUT", f"{_CHECKPOINT}/ttl", set_ttl),
    Endpoint("POST", f"{_CHECKPOINT}/publish", publish),
    Endpoint("DELETE", f"{_CHECKPOINT}/publish", unpublish),
]
