from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse
from tinker import types
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from tinkerscript.errors import WireError
from tinkerscript.tinker_api.codec import Reply, read_json, write_result
from tinkerscript.tinker_api.records import Checkpoint, RunRecord, lora_reply
from tinkerscript.tinker_api.state import WireState

# The SDK has no types for these bodies.


class CancelRequest(BaseModel):
    request_id: str


class SessionEndReason(BaseModel):
    type: str


class FinishRequest(BaseModel):
    reason: SessionEndReason
    detail: str | None = None


class WeightsInfoRequest(BaseModel):
    tinker_path: str


class TtlRequest(BaseModel):
    ttl_seconds: int | None = None


CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
"""No token exchange, plain httpx, one request per run at a time, protobuf before 0.25."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def create_session(state: WireState, request: types.CreateSessionRequest) -> Reply:
    session = state.sessions.create(
        user_metadata=request.user_metadata or {}, display_name=request.display_name
    )
    reply: dict[str, Any] = {"session_id": session.session_id}
    if not state.engine.is_lora:
        reply["info_message"] = "This server trains all weights (--full); the LoRA rank is ignored."
    if request.project_id is not None:
        reply["warning_message"] = (
            f"project_id {request.project_id!r} is ignored: this server has no projects"
        )
    return reply


async def heartbeat(state: WireState, request: SessionHeartbeatRequest) -> Reply:
    state.sessions.active(request.session_id)
    return {"type": "session_heartbeat"}


async def finish_session(state: WireState, request: Request, body: bytes) -> Reply:
    finish = read_json(FinishRequest, body)
    session = state.sessions.get(request.path_params["session_id"])
    state.end(session, f"{finish.reason.type}: {finish.detail}" if finish.detail else finish.reason.type)
    return None


async def capabilities(state: WireState, request: Request) -> Reply:
    del request
    model = {
        "model_name": state.name,
        "max_context_length": state.engine.max_context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


async def retrieve_future(state: WireState, request: Request, body: bytes) -> Reply:
    """Status 408 makes the client ask again."""
    request_id = read_json(FutureRetrieveRequest, body).request_id
    answer = await state.futures.fetch(request_id, state.limits.poll_s)
    if answer is None:
        waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return JSONResponse(waiting, status_code=408)
    return write_result(answer, accept=request.headers.get("accept", ""))


async def cancel_future(state: WireState, request: CancelRequest) -> Reply:
    state.futures.cancel(request.request_id)
    return None


async def weights_info(state: WireState, request: WeightsInfoRequest) -> Reply:
    checkpoint = state.checkpoints.find(request.tinker_path, field="tinker_path")
    config = checkpoint.lora_config or {}
    parts = {name: config.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return {"base_model": checkpoint.base_model, **lora_reply(checkpoint), **parts}


async def get_sampler(state: WireState, request: Request) -> Reply:
    record = state.sessions.sampler(request.path_params["sampler_id"])[1]
    return {"sampler_id": record.sampler_id, "base_model": record.base_model, "model_path": record.model_path}


async def get_session(state: WireState, request: Request) -> Reply:
    session = state.sessions.get(request.path_params["session_id"])
    return {
        "training_run_ids": list(session.runs),
        "sampler_ids": list(session.samplers),
        "user_metadata": _as_texts(session.user_metadata),
        "display_name": session.display_name,
    }


async def list_sessions(state: WireState, request: Request) -> Reply:
    page, _ = _page(request, [session.session_id for session in state.sessions.all()])
    return {"sessions": page}


async def get_training_run(state: WireState, request: Request) -> Reply:
    return _run_reply(state, state.sessions.run(request.path_params["run_id"])[1])


async def list_training_runs(state: WireState, request: Request) -> Reply:
    records = [record for session in state.sessions.all() for record in session.runs.values()]
    page, cursor = _page(request, sorted(records, key=lambda r: r.last_request, reverse=True))
    return {"training_runs": [_run_reply(state, record) for record in page], "cursor": cursor}


def _run_reply(state: WireState, record: RunRecord) -> dict[str, Any]:
    checkpoints = state.checkpoints.all(record.run_id)
    newest = {c.kind: state.checkpoints.as_reply(c) for c in reversed(checkpoints)}
    return {
        "training_run_id": record.run_id,
        "base_model": record.base_model,
        "model_owner": "local",
        **lora_reply(record),
        "last_request_time": record.last_request,
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": None if record.user_metadata is None else _as_texts(record.user_metadata),
    }


async def list_run_checkpoints(state: WireState, request: Request) -> Reply:
    found = state.checkpoints.all(request.path_params["run_id"])
    return {"checkpoints": [state.checkpoints.as_reply(checkpoint) for checkpoint in found], "cursor": None}


async def list_checkpoints(state: WireState, request: Request) -> Reply:
    page, cursor = _page(request, state.checkpoints.all())
    return {"checkpoints": [state.checkpoints.as_reply(each) for each in page], "cursor": cursor}


async def delete_checkpoint(state: WireState, request: Request) -> Reply:
    checkpoint = _addressed(state, request)
    state.checkpoints.delete(checkpoint)
    state.forget_path(checkpoint.path)
    return None


async def set_ttl(state: WireState, request: Request, body: bytes) -> Reply:
    state.checkpoints.set_ttl(_addressed(state, request), read_json(TtlRequest, body).ttl_seconds)
    return None


async def publish(state: WireState, request: Request) -> Reply:
    state.checkpoints.set_public(_addressed(state, request), public=True)
    return None


async def unpublish(state: WireState, request: Request) -> Reply:
    state.checkpoints.set_public(_addressed(state, request), public=False)
    return None


def _addressed(state: WireState, request: Request) -> Checkpoint:
    parts = request.path_params
    return state.checkpoints.find(f"tinker://{parts['run_id']}/{parts['kind']}/{parts['name']}")


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    values: dict[str, int] = {}
    for name, default in (("limit", 100), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdigit():
            raise WireError(400, f"{name}: {text!r} must be a whole number of items")
        values[name] = int(text)
    offset, limit = values["offset"], values["limit"]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _as_texts(metadata: dict[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else str(value) for key, value in metadata.items()}
