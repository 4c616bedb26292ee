"""Training runs: made, trained, saved, loaded.

Requests of one run take effect in the order of their `seq_id`; one that comes again starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from starlette.requests import Request
from tinker import types

from tinkerscript.engine.losses import LOSSES
from tinkerscript.errors import EngineRequestError, WireError
from tinkerscript.tinker_api.checkpoints import Checkpoint
from tinkerscript.tinker_api.codec import read_forward_backward, write_forward_backward
from tinkerscript.tinker_api.endpoint import Endpoint, Reply, post
from tinkerscript.tinker_api.futures import FutureResult
from tinkerscript.tinker_api.sessions import ClientSession, RunRecord, SamplerRecord, now
from tinkerscript.tinker_api.state import Run, WireState


async def create_model(state: WireState, request: types.CreateModelRequest) -> Reply:
    session = state.sessions.active(request.session_id)
    base_model = state.check_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    _check_lora(request.lora_config)
    return _begin_run(state, session, request.model_seq_id, base_model, request.user_metadata, None)


def _begin_run(
    state: WireState,
    session: ClientSession,
    model_seq_id: int,
    base_model: str,
    user_metadata: dict[str, object] | None,
    source: tuple[Checkpoint, bool] | None,
) -> dict[str, str]:
    """A new run over the base model's weights, or a checkpoint's (`source`, with its optimizer or not)."""
    model_id = f"{session.session_id}:train:{model_seq_id}"
    key = (model_id, "create")
    if not state.futures.known(key):
        if model_id in session.runs:
            raise WireError(400, f"model_seq_id: the session has a run {model_seq_id} already")
        if len(state.runs) + _being_made(state) >= state.limits.runs:
            raise WireError(429, f"{state.limits.runs} training runs are in memory, and that is the limit")
        session.runs[model_id] = RunRecord(model_id, base_model, now(), user_metadata)
        state.sessions.save(session)

    async def work() -> FutureResult:
        folder = None if source is None else state.checkpoints.folder(source[0])
        try:
            client = await state.engine.train_copy(folder, optimizer=source is not None and source[1])
        except BaseException:
            session.runs.pop(model_id, None)
            state.sessions.save(session)
            raise
        state.runs[model_id] = Run(client, session.session_id)
        if source is None:
            return {"model_id": model_id, "type": "create_model"}
        return {"path": source[0].path, "model_id": model_id, "type": "load_weights"}

    request_id = state.futures.begin(key, work, session_id=session.session_id)
    return {"request_id": request_id, "model_id": model_id}


def _being_made(state: WireState) -> int:
    return sum(
        run_id not in state.runs
        for session in state.sessions.all()
        if session.finished is None
        for run_id in session.runs
        if state.futures.running((run_id, "create"))
    )


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise WireError(400, f"optimizer_config.type: only 'adamw' is here, not {config.type!r}")


def _check_lora(config: types.LoraConfig | None) -> None:
    for name in ("train_unembed", "train_mlp", "train_attn"):
        if config is not None and not getattr(config, name):
            raise WireError(400, f"lora_config.{name}: this engine trains all weights, so it must be true")


async def get_info(state: WireState, request: types.GetInfoRequest) -> Reply:
    state.run(request.model_id)
    return {
        "type": "get_info",
        "model_data": {
            "arch": state.engine.architecture,
            "model_name": state.name,
            "tokenizer_id": str(state.engine.folder.resolve()),
        },
        "model_id": request.model_id,
        "is_lora": False,
        "lora_rank": None,
        "model_name": state.name,
    }


async def forward_backward(state: WireState, request: Request, body: bytes) -> Reply:
    del request
    call = read_forward_backward(body)
    run = state.run(call.model_id)
    method = run.client.forward if call.forward_only else run.client.forward_backward

    async def work() -> FutureResult:
        # Not `resolve_loss`: a request must not import what it names.
        if call.loss_fn not in LOSSES:
            raise EngineRequestError(f"loss_fn {call.loss_fn!r} is not one of {', '.join(LOSSES)}")
        loss_fn = cast("types.LossFnType", call.loss_fn)
        return write_forward_backward(await method(call.data, loss_fn, call.loss_fn_config))

    return _begin(state, run, call.model_id, call.seq_id, work)


async def optim_step(state: WireState, request: types.OptimStepRequest) -> Reply:
    run = state.run(request.model_id)
    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise WireError(400, f"optimizer_params.type: only Adam is here, not {params.type!r}")

    async def work() -> FutureResult:
        response = await run.client.optim_step(params)
        return {"metrics": response.metrics}

    return _begin(state, run, request.model_id, request.seq_id, work)


async def save_weights(state: WireState, request: types.SaveWeightsRequest) -> Reply:
    run = state.run(request.model_id)
    checkpoint = _planned(state, request, "weights")
    overwrite = request.overwrite

    async def work() -> FutureResult:
        await _write(state, run, checkpoint, overwrite=overwrite)
        return {"path": checkpoint.path, "type": "save_weights"}

    return _begin(state, run, request.model_id, request.seq_id, work)


async def save_weights_for_sampler(state: WireState, request: types.SaveWeightsForSamplerRequest) -> Reply:
    """Without a path: weights for sampling now, kept in memory."""
    run = state.run(request.model_id)
    if request.sampling_session_seq_id is None:
        checkpoint = _planned(state, request, "sampler_weights")

        async def work() -> FutureResult:
            await _write(state, run, checkpoint, overwrite=False)
            return {"path": checkpoint.path, "type": "save_weights_for_sampler"}

        return _begin(state, run, request.model_id, request.seq_id, work)
    session = state.sessions.active(run.session_id)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"

    async def snapshot() -> FutureResult:
        client = await run.client.save_weights_and_get_sampling_client()
        session.samplers[sampler_id] = SamplerRecord(sampler_id, state.name, snapshot=True)
        state.keep_snapshot(sampler_id, client)
        return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

    return _begin(state, run, request.model_id, request.seq_id, snapshot)


def _planned(
    state: WireState, request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest, kind: str
) -> Checkpoint:
    return state.checkpoints.planned(
        request.model_id,
        kind,
        request.path,
        base_model=state.name,
        user_metadata=request.user_metadata,
        ttl_seconds=request.ttl_seconds,
    )


async def _write(state: WireState, run: Run, checkpoint: Checkpoint, *, overwrite: bool) -> None:
    if state.checkpoints.exists(checkpoint) and not overwrite:
        raise WireError(400, f"path: {checkpoint.path} is there already; another name, or overwrite=True")
    written = run.client.save_to(
        state.checkpoints.folder(checkpoint),
        optimizer=checkpoint.kind == "weights",
        notes=state.checkpoints.notes(checkpoint),
    )
    await asyncio.wrap_future(written)
    state.forget_path(checkpoint.path)


async def load_weights(state: WireState, request: types.LoadWeightsRequest) -> Reply:
    """Into a new run (`session_id`), or into one that is there (`model_id`)."""
    if request.weights_access_token is not None:
        raise WireError(400, "weights_access_token: there are no accounts here; leave it out")
    _check_optimizer(request.optimizer_config)
    checkpoint = state.checkpoints.find(request.path)
    if request.base_model is not None:
        state.check_model(request.base_model)
    if request.session_id is not None and request.model_seq_id is not None:
        session = state.sessions.active(request.session_id)
        source = (checkpoint, request.optimizer)
        metadata = request.user_metadata
        return _begin_run(state, session, request.model_seq_id, state.name, metadata, source)
    if request.model_id is None:
        raise WireError(400, "model_id: give it, or session_id with model_seq_id")
    run = state.run(request.model_id)
    folder = state.checkpoints.folder(checkpoint)
    load = run.client.load_state_with_optimizer if request.optimizer else run.client.load_state

    async def work() -> FutureResult:
        await load(folder)
        return {"path": checkpoint.path, "model_id": request.model_id, "type": "load_weights"}

    return _begin(state, run, request.model_id, request.seq_id, work)


def _begin(
    state: WireState, run: Run, model_id: str, seq_id: int | None, work: Callable[[], Awaitable[FutureResult]]
) -> dict[str, str]:
    """Start a request of a run, unless it was started before."""
    if seq_id is None:
        raise WireError(400, "seq_id: it is required")
    key = (model_id, seq_id)
    if not state.futures.known(key):
        if seq_id <= run.last_seq:
            raise WireError(400, f"seq_id: {seq_id} comes after {run.last_seq}")
        state.check_room()
        run.last_seq = seq_id
        state.sessions.run(model_id)[1].last_request = now()
    request_id = state.futures.begin(key, work, session_id=run.session_id)
    return {"request_id": request_id, "model_id": model_id}


CALLS = [
    post("create_model", types.CreateModelRequest, create_model),
    post("get_info", types.GetInfoRequest, get_info),
    Endpoint("POST", "forward_backward", forward_backward),
    post("optim_step", types.OptimStepRequest, optim_step),
    post("save_weights", types.SaveWeightsRequest, save_weights),
    post("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, save_weights_for_sampler),
    post("load_weights", types.LoadWeightsRequest, load_weights),
]
