"""What a client asks first, sessions, and the fetching of results."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types
from tinker.types.client_config_request import ClientConfigRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from tinkerscript.tinker_api.endpoint import Endpoint, Reply, post, read
from tinkerscript.tinker_api.state import WireState


class CancelRequest(BaseModel):
    """Body of `cancel_future`; the SDK has no type for it."""

    request_id: str


class SessionEndReason(BaseModel):
    type: str


class FinishRequest(BaseModel):
    """Body of `sessions/{id}/finish`; the SDK has no type for it."""

    reason: SessionEndReason
    detail: str | None = None


async def health(state: WireState, request: Request, body: bytes) -> Reply:
    del state, request, body
    return {"status": "ok"}


async def client_config(state: WireState, request: ClientConfigRequest) -> Reply:
    """No tokens to exchange, plain httpx, one request at a time for each run."""
    del state, request
    return {
        "pjwt_auth_enabled": False,
        "use_pyqwest_transport": False,
        "parallel_fwdbwd_chunks": False,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": False,
    }


async def dynamic_config(state: WireState, request: ClientConfigRequest) -> Reply:
    del state, request
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def telemetry(state: WireState, request: Request, body: bytes) -> Reply:
    """Heard and dropped: nothing that a client says about itself is kept."""
    del state, request, body
    return {"status": "accepted"}


async def create_session(state: WireState, request: types.CreateSessionRequest) -> Reply:
    session = state.sessions.create(
        user_metadata=request.user_metadata or {}, display_name=request.display_name
    )
    reply: dict[str, Any] = {
        "session_id": session.session_id,
        "info_message": "This engine trains all weights; a LoRA rank is accepted and not used.",
    }
    if request.project_id is not None:
        reply["warning_message"] = (
            f"project_id {request.project_id!r} is not kept: there are no projects here"
        )
    return reply


async def heartbeat(state: WireState, request: SessionHeartbeatRequest) -> Reply:
    state.sessions.active(request.session_id)
    return {"type": "session_heartbeat"}


async def finish_session(state: WireState, request: Request, body: bytes) -> Reply:
    finish = read(FinishRequest, body)
    session = state.sessions.get(request.path_params["session_id"])
    state.end(session, f"{finish.reason.type}: {finish.detail}" if finish.detail else finish.reason.type)
    return None


async def capabilities(state: WireState, request: Request, body: bytes) -> Reply:
    del request, body
    model = {
        "model_name": state.name,
        "max_context_length": state.engine.max_context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


async def retrieve_future(state: WireState, request: FutureRetrieveRequest) -> Reply:
    """Wait for a result. 408 with the state of the queue: not yet, ask again."""
    answer = await state.futures.fetch(request.request_id, state.limits.poll_s)
    if answer is None:
        waiting = {"type": "try_again", "request_id": request.request_id, "queue_state": "active"}
        return JSONResponse(waiting, status_code=408)
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/x-protobuf")
    return answer


async def cancel_future(state: WireState, request: CancelRequest) -> Reply:
    state.futures.cancel(request.request_id)
    return None


CALLS = [
    Endpoint("GET", "healthz", health),
    post("client/config", ClientConfigRequest, client_config),
    post("client/dynamic_config", ClientConfigRequest, dynamic_config),
    Endpoint("POST", "telemetry", telemetry),
    post("create_session", types.CreateSessionRequest, create_session),
    post("session_heartbeat", SessionHeartbeatRequest, heartbeat),
    Endpoint("POST", "sessions/{session_id}/finish", finish_session),
    Endpoint("GET", "get_server_capabilities", capabilities),
    post("retrieve_future", FutureRetrieveRequest, retrieve_future),
    post("cancel_future", CancelRequest, cancel_future),
]
