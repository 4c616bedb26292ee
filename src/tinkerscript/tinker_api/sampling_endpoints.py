from __future__ import annotations

from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.topk_logprobs import TopkLogprobs

from tinkerscript.engine.sampling import PromptScores
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.errors import WireError
from tinkerscript.tinker_api.codec import FutureResult, Reply
from tinkerscript.tinker_api.records import SamplerRecord
from tinkerscript.tinker_api.state import WireState


async def create_sampling_session(state: WireState, request: CreateSamplingSessionRequest) -> Reply:
    session = state.sessions.active(request.session_id)
    if request.model_path is not None:
        state.checkpoint(request.model_path, field="model_path")
    elif request.base_model is None:
        raise WireError(400, "base_model: required unless model_path is given")
    if request.base_model is not None:
        state.check_model(request.base_model)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    record = SamplerRecord(sampler_id, state.name, request.model_path)
    former = session.samplers.setdefault(sampler_id, record)
    if former != record:
        raise WireError(
            400, f"sampling_session_seq_id: {request.sampling_session_seq_id} belongs to another sampler"
        )
    state.sessions.save(session)
    return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}


async def join_sampling_session(state: WireState, request: JoinSamplingSessionRequest) -> Reply:
    """Number a client's copy, so that the copies' request ids differ."""
    session, record = state.sessions.sampler(request.sampling_session_id)
    record.clones += 1
    state.sessions.save(session)
    return {"client_counter": record.clones, "type": "join_sampling_session"}


async def asample(state: WireState, request: types.SampleRequest) -> Reply:
    if request.sampling_session_id is None or request.seq_id is None:
        raise WireError(400, "sampling_session_id: required, together with seq_id")
    session, record = state.sessions.sampler(request.sampling_session_id)
    state.sessions.active(session.session_id)
    _check_supported(request)
    key = (request.sampling_session_id, request.seq_id)
    if not state.futures.known(key):
        _check_room(state, request.num_samples)

        async def work() -> FutureResult:
            client = await state.weights_of(record)
            return await _sample(client, request)

        state.futures.begin(key, work, session_id=session.session_id, samples=request.num_samples)
    request_id = state.futures.id_of(key)
    names = [f"{request_id}-{i}" for i in range(request.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": names}


def _check_room(state: WireState, num_samples: int) -> None:
    limit = state.limits.waiting_samples
    if not 1 <= num_samples <= limit:
        raise WireError(400, f"num_samples: {num_samples} is not between 1 and {limit}")
    if state.futures.samples + num_samples > limit:
        raise WireError(429, f"{state.futures.samples} sequences are waiting; the limit is {limit}")
    state.check_room()


def _check_supported(request: types.SampleRequest) -> None:
    if request.topk_sample_logprobs:
        raise WireError(
            400, "topk_sample_logprobs: not supported; request topk_prompt_logprobs of the result instead"
        )
    if request.prompt_alt_tokens_k:
        raise WireError(400, "prompt_alt_tokens_k: not supported")
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise WireError(400, "prompt.chunks: only tokens (encoded_text) are supported")
    length, last = request.prompt.length, request.prompt_logprobs_last_n
    if last is not None and (not request.prompt_logprobs or not 1 <= last <= length - 1):
        raise WireError(
            400, f"prompt_logprobs_last_n: {last} must be 1 to {length - 1}, with prompt_logprobs set"
        )
    if request.topk_prompt_logprobs < 0:
        raise WireError(400, f"topk_prompt_logprobs: {request.topk_prompt_logprobs} must be at least 0")


async def _sample(client: EmbeddedSamplingClient, request: types.SampleRequest) -> tinker.SampleResponse:
    # Queue both before awaiting either.
    target = None if request.target_prompt_logprobs is None else _Target(request)
    sampled = client.sample(request.prompt, request.num_samples, request.sampling_params)
    if not (request.prompt_logprobs or request.topk_prompt_logprobs or target):
        return await sampled
    scored = client.score(
        request.prompt,
        last=request.prompt_logprobs_last_n,
        top=request.topk_prompt_logprobs,
        chosen=target and target.cells,
    )
    response, scores = await sampled, await scored
    return tinker.SampleResponse(
        sequences=response.sequences,
        prompt_logprobs_np=scores.logprobs if request.prompt_logprobs else None,
        topk_prompt_logprobs_np=_top(scores),
        target_prompt_logprobs=target and target.answer(scores),
    )


def _top(scores: PromptScores) -> TopkLogprobs | None:
    if scores.top_ids is None or scores.top_logprobs is None:
        return None
    return TopkLogprobs(token_ids=scores.top_ids, logprobs=scores.top_logprobs)


class _Target:
    """The ids of `target_prompt_logprobs`, dense or sparse. -1 marks an unused cell."""

    def __init__(self, request: types.SampleRequest) -> None:
        asked = request.target_prompt_logprobs
        assert asked is not None
        shape = asked.shape or []
        if asked.dtype != "int64" or len(shape) != 2 or shape[0] != request.prompt.length - 1:
            raise WireError(
                400,
                f"target_prompt_logprobs: expected int64 of shape [{request.prompt.length - 1}, K], "
                f"got {asked.dtype} {shape}",
            )
        self._asked = asked
        self._shape = list(shape)
        self._ids: NDArray[np.int64] = np.asarray(asked.data, np.int64).reshape(-1)
        if asked.sparse_crow_indices is None:
            rows: NDArray[np.int64] = np.repeat(np.arange(shape[0]), shape[1])
        else:
            rows = np.repeat(np.arange(shape[0]), np.diff(np.asarray(asked.sparse_crow_indices)))
        if len(rows) != len(self._ids):
            raise WireError(
                400, f"target_prompt_logprobs.data: {len(self._ids)} values for {len(rows)} cells"
            )
        self._wanted: Any = self._ids >= 0
        self.cells = (rows[self._wanted].astype(np.int64), self._ids[self._wanted])

    def answer(self, scores: PromptScores) -> tinker.TensorData:
        """Return logprobs in that layout, with 0 in unused cells."""
        assert scores.chosen is not None
        values = np.zeros(len(self._ids), np.float32)
        values[self._wanted] = scores.chosen
        return tinker.TensorData(
            data=values,
            dtype="float32",
            shape=self._shape,
            sparse_crow_indices=self._asked.sparse_crow_indices,
            sparse_col_indices=self._asked.sparse_col_indices,
        )
