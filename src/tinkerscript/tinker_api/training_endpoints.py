"""Endpoints that create, train, save and load runs.

A run's requests take effect in `seq_id` order, and repeated ones have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import numpy as np
import tinker
from starlette.requests import Request
from tinker import types

from tinkerscript.engine.losses import POLICY_INPUTS, SKIPPED_STEPS
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import EngineError, EngineRequestError, WireError
from tinkerscript.tinker_api.codec import ForwardBackwardCall, FutureResult, Reply, read_forward_backward
from tinkerscript.tinker_api.records import (
    Checkpoint,
    ClientSession,
    RunRecord,
    SamplerRecord,
    lora_reply,
    timestamp,
)
from tinkerscript.tinker_api.state import Run, WireState

# Fields of Tinker's LoraConfig.
LORA_PARTS = {"attn": "train_attn", "mlp": "train_mlp", "unembed": "train_unembed"}

LORA_ALPHA = 32.0  # Tinker's value for every rank.

TINKER_LOSSES = {
    "cross_entropy": frozenset({"target_tokens", "weights"}),
    "importance_sampling": POLICY_INPUTS,
    "ppo": POLICY_INPUTS,
    "cispo": POLICY_INPUTS,
    "dro": POLICY_INPUTS,
    "gspo": POLICY_INPUTS | {"sequence_ratio_mask"},
    "stable_reinforce": POLICY_INPUTS,
}
"""The inputs in Tinker's documentation of each `loss_fn`."""

STABLE_REINFORCE = {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
"""`cispo` parameters for `stable_reinforce`: REINFORCE with truncated importance sampling (Yao et al. 2025).

Tinker publishes no formula for it (docs/tinker.md#the-server).
"""

DEFAULT_RANK = 32  # The SDK's default.


async def create_model(state: WireState, request: types.CreateModelRequest) -> Reply:
    session = state.sessions.active(request.session_id)
    state.check_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    lora_config = _checked_lora(state, request.lora_config)
    return _begin_run(state, session, request.model_seq_id, request.user_metadata, lora_config, None)


def _begin_run(
    state: WireState,
    session: ClientSession,
    model_seq_id: int,
    user_metadata: dict[str, Any] | None,
    lora_config: dict[str, Any] | None,
    source: tuple[Checkpoint, bool] | None,
) -> dict[str, str]:
    """`source` is a checkpoint, and whether to load its optimizer state."""
    model_id = f"{session.session_id}:train:{model_seq_id}"
    record = RunRecord(model_id, state.name, timestamp(), user_metadata, lora_config)
    key = (model_id, "create")
    if not state.futures.known(key):
        if model_id in session.runs:
            raise WireError(400, f"model_seq_id: the session already has a run {model_seq_id}")
        if len(state.runs) + _starting(state) >= state.limits.runs:
            raise WireError(
                429, f"{state.limits.runs} training runs are in memory, the limit; finish a session"
            )
        session.runs[model_id] = record
        state.sessions.save(session)

    async def work() -> FutureResult:
        try:
            client = await _new_client(state, record, source)
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


async def _new_client(
    state: WireState, record: RunRecord, source: tuple[Checkpoint, bool] | None
) -> EmbeddedTrainingClient:
    if source is not None:
        return await state.engine.train_copy(state.checkpoints.folder(source[0]), optimizer=source[1])
    config = record.lora_config
    if config is None:
        return await state.engine.train_copy()
    targets = tuple(target for target, name in LORA_PARTS.items() if config[name])
    settings = LoraSettings(config["rank"], LORA_ALPHA, targets, config["seed"] or 0)
    try:
        return await state.engine.train_copy(lora=settings)
    except EngineRequestError as error:
        raise EngineRequestError(f"lora_config: {error} (rank, {', '.join(LORA_PARTS.values())})") from error


def _starting(state: WireState) -> int:
    return sum(
        run_id not in state.runs
        for session in state.sessions.all()
        if session.finished is None
        for run_id in session.runs
        if state.futures.running((run_id, "create"))
    )


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise WireError(400, f"optimizer_config.type: only 'adamw' is supported, not {config.type!r}")


def _checked_lora(state: WireState, config: types.LoraConfig | None) -> dict[str, Any] | None:
    """Return the `LoraConfig`, or None if all weights train."""
    config = config or types.LoraConfig(rank=DEFAULT_RANK)
    left_out = [name for name in LORA_PARTS.values() if not getattr(config, name)]
    if not state.engine.is_lora:
        if left_out:
            raise WireError(
                400, f"lora_config.{left_out[0]}: must be true: this server trains all weights (--full)"
            )
        return None
    if len(left_out) == len(LORA_PARTS):
        raise WireError(400, f"lora_config: nothing would train; one of {', '.join(left_out)} must be true")
    if config.seed is not None and not 0 <= config.seed < 2**63:
        raise WireError(400, f"lora_config.seed: must be 0 to 2**63 - 1, got {config.seed}")
    return config.model_dump()


def _check_adapter(checkpoint: Checkpoint, record: RunRecord) -> None:
    mine, theirs = record.lora_config or {}, checkpoint.lora_config or {}
    differing = [name for name in ("rank", *LORA_PARTS.values()) if mine.get(name) != theirs.get(name)]
    if differing:
        has, wants = (", ".join(f"{name}={config[name]}" for name in differing) for config in (theirs, mine))
        raise WireError(
            400,
            f"path: {checkpoint.path} has {has}, and the run {wants}; use create_training_client_from_state "
            "to start a run with the checkpoint's settings",
        )


async def get_info(state: WireState, request: types.GetInfoRequest) -> Reply:
    state.run(request.model_id)
    record = state.sessions.run(request.model_id)[1]
    return {
        "type": "get_info",
        "model_data": {
            "arch": state.engine.architecture,
            "model_name": state.name,
            "tokenizer_id": str(state.engine.folder.resolve()),
        },
        "model_id": request.model_id,
        **lora_reply(record),
        "model_name": state.name,
    }


async def forward_backward(state: WireState, request: Request, body: bytes) -> Reply:
    del request
    call = read_forward_backward(body)
    run = state.run(call.model_id)
    method = run.client.forward if call.forward_only else run.client.forward_backward

    async def work() -> FutureResult:
        data, loss_fn, config = _for_engine(call)
        return await method(data, cast("types.LossFnType", loss_fn), config)

    return _begin(state, run, call.model_id, call.seq_id, work)


def _for_engine(call: ForwardBackwardCall) -> tuple[list[tinker.Datum], str, dict[str, float | str]]:
    needed = TINKER_LOSSES.get(call.loss_fn)
    if needed is None:  # `resolve_loss` could import a module that the request names.
        raise EngineRequestError(f"loss_fn {call.loss_fn!r} is not one of {', '.join(TINKER_LOSSES)}")
    for index, datum in enumerate(call.data):
        if (given := frozenset(datum.loss_fn_inputs)) != needed:
            raise EngineRequestError(
                f"datum {index}: {call.loss_fn} needs loss_fn_inputs {sorted(needed)}, got {sorted(given)}"
            )
    match call.loss_fn:
        case "gspo":
            return [_averaged(datum) for datum in call.data], "gspo", call.loss_fn_config
        case "dro":
            return [_without_padding(datum) for datum in call.data], "dro", call.loss_fn_config
        case "stable_reinforce":
            if call.loss_fn_config:
                raise EngineRequestError(
                    f"loss_fn_config: {call.loss_fn} has none, got {call.loss_fn_config}"
                )
            return call.data, "cispo", dict(STABLE_REINFORCE)
        case _:
            return call.data, call.loss_fn, call.loss_fn_config


def _averaged(datum: tinker.Datum) -> tinker.Datum:
    # Tinker's `gspo` sums over the ratio's tokens, the engine's averages.
    inputs = dict(datum.loss_fn_inputs)
    mask = inputs.pop("sequence_ratio_mask").to_numpy() != 0
    advantages = inputs["advantages"].to_numpy() * max(1, int(mask.sum()))
    return _with_inputs(datum, inputs, advantages=advantages, mask=mask)


def _without_padding(datum: tinker.Datum) -> tinker.Datum:
    # The engine's `dro` would penalize prompts, which lack advantages and logprobs.
    inputs = dict(datum.loss_fn_inputs)
    mask = (inputs["advantages"].to_numpy() != 0) | (inputs["logprobs"].to_numpy() != 0)
    return _with_inputs(datum, inputs, mask=mask)


def _with_inputs(
    datum: tinker.Datum, inputs: Mapping[str, tinker.TensorData], **more: np.ndarray
) -> tinker.Datum:
    tensors = {name: tinker.TensorData.from_numpy(each.astype(np.float32)) for name, each in more.items()}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs={**inputs, **tensors})


async def optim_step(state: WireState, request: types.OptimStepRequest) -> Reply:
    run = state.run(request.model_id)
    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise WireError(400, f"optimizer_params.type: only Adam is supported, not {params.type!r}")

    async def work() -> FutureResult:
        response = await run.client.optim_step(params)
        if SKIPPED_STEPS in (response.metrics or {}):
            # Tinker has no metric for it, so clients would think the step was taken.
            raise EngineError("the gradient is not finite; the step was not taken")
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
    """Save to disk, or with `sampling_session_seq_id` to a sampler in memory."""
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
        lora_config=state.sessions.run(request.model_id)[1].lora_config,
        user_metadata=request.user_metadata,
        ttl_seconds=request.ttl_seconds,
    )


async def _write(state: WireState, run: Run, checkpoint: Checkpoint, *, overwrite: bool) -> None:
    if state.checkpoints.exists(checkpoint) and not overwrite:
        raise WireError(400, f"path: {checkpoint.path} exists; choose another name, or pass overwrite=True")
    written = run.client.save_to(
        state.checkpoints.folder(checkpoint),
        optimizer=checkpoint.kind == "weights",
        notes=state.checkpoints.notes(checkpoint),
    )
    await asyncio.wrap_future(written)
    state.forget_path(checkpoint.path)


async def load_weights(state: WireState, request: types.LoadWeightsRequest) -> Reply:
    """Load into a new run (`session_id`) or an existing one (`model_id`)."""
    if request.weights_access_token is not None:
        raise WireError(400, "weights_access_token: this server has no accounts; leave it out")
    _check_optimizer(request.optimizer_config)
    checkpoint = state.checkpoint(request.path)
    if request.base_model is not None:
        state.check_model(request.base_model)
    if request.session_id is not None and request.model_seq_id is not None:
        session = state.sessions.active(request.session_id)
        source = (checkpoint, request.optimizer)
        metadata, lora_config = request.user_metadata, checkpoint.lora_config
        return _begin_run(state, session, request.model_seq_id, metadata, lora_config, source)
    if request.model_id is None:
        raise WireError(400, "model_id: required unless session_id and model_seq_id are given")
    run = state.run(request.model_id)
    _check_adapter(checkpoint, state.sessions.run(request.model_id)[1])
    folder = state.checkpoints.folder(checkpoint)
    load = run.client.load_state_with_optimizer if request.optimizer else run.client.load_state

    async def work() -> FutureResult:
        await load(folder)
        return {"path": checkpoint.path, "model_id": request.model_id, "type": "load_weights"}

    return _begin(state, run, request.model_id, request.seq_id, work)


def _begin(
    state: WireState,
    run: Run,
    model_id: str,
    seq_id: int | None,
    work: Callable[[], Coroutine[Any, Any, FutureResult]],
) -> dict[str, str]:
    if seq_id is None:
        raise WireError(400, "seq_id: required")
    key = (model_id, seq_id)
    if not state.futures.known(key):
        if seq_id <= run.last_seq:
            raise WireError(400, f"seq_id: {seq_id} is out of order: the last one was {run.last_seq}")
        state.check_room()
        run.last_seq = seq_id
        state.sessions.run(model_id)[1].last_request = timestamp()
    request_id = state.futures.begin(key, work, session_id=run.session_id)
    return {"request_id": request_id, "model_id": model_id}
