"""Convert request bodies and replies from and to the SDK's types.

Clients that accept protobuf (SDK 0.24 and later) get samples and losses in it, others JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tinker
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as pb

from tinkerscript.errors import EngineRequestError, WireError

Reply = dict[str, Any] | Response | None
"""None is an empty reply."""

FutureResult = tinker.SampleResponse | tinker.ForwardBackwardOutput | dict[str, Any]

M = TypeVar("M", bound=BaseModel)

_NUMPY_TYPES: dict[int, tuple[tinker.types.TensorDtype, type[np.generic]]] = {
    pb.DTYPE_FLOAT32: ("float32", np.float32),
    pb.DTYPE_INT64: ("int64", np.int64),
}


def read_json(model: type[M], body: bytes) -> M:
    """Raises WireError 422 with the field's path and value."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}, "
            f"got {_short(item.get('input'))}"
            for item in error.errors()
        ]
        raise WireError(422, "; ".join(problems)) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class ForwardBackwardCall:
    model_id: str
    seq_id: int
    data: list[tinker.Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackwardCall:
    """Raises EngineRequestError with the field's path."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise EngineRequestError(f"the body is not a protobuf ForwardBackwardRequest: {error}") from error
    if not message.data:
        raise EngineRequestError("data: it is empty")
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=_config(message),
        forward_only=message.forward_only,
    )


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    # `loss_fn_config` holds only numbers, so `loss_fn_config_v2` wins.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def _datum(message: pb.Datum, where: str) -> tinker.Datum:
    tokens: list[int] = []
    for i, chunk in enumerate(message.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise EngineRequestError(
                f"{where}.model_input[{i}]: {kind} is not supported; send tokens (encoded_text)"
            )
        tokens += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: read_tensor(tensor, f"{where}.loss_fn_inputs.{name}")
            for name, tensor in message.loss_fn_inputs.items()
        },
    )


def read_tensor(message: pb.Tensor, where: str) -> tinker.TensorData:
    """Read a one-dimensional tensor. Raises EngineRequestError with `where`."""
    shape = list(message.shape)
    if message.dtype not in _NUMPY_TYPES:
        raise EngineRequestError(f"{where}: dtype {message.dtype} is not float32 or int64")
    if message.HasField("sparse_csr") or len(shape) > 1:
        raise EngineRequestError(f"{where}: shape {shape} is not supported; send one value per position")
    name, dtype = _NUMPY_TYPES[message.dtype]
    return tinker.TensorData(data=np.frombuffer(message.dense, dtype=dtype).copy(), dtype=name, shape=None)


PROTOBUF = "application/x-protobuf"


def write_result(result: FutureResult, *, accept: str) -> Reply:
    if isinstance(result, dict):
        return result
    is_sample = isinstance(result, tinker.SampleResponse)
    if PROTOBUF in accept:
        body = write_sample(result) if is_sample else write_forward_backward(result)
        return Response(body, media_type=PROTOBUF)
    return sample_json(result) if is_sample else forward_backward_json(result)


def sample_json(response: tinker.SampleResponse) -> dict[str, Any]:
    return {
        "type": "sample",
        "sequences": [
            {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens, "logprobs": sequence.logprobs}
            for sequence in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
    }


def forward_backward_json(output: tinker.ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: _tensor_json(tensor.to_numpy()) for name, tensor in row.items()}
            for row in output.loss_fn_outputs
        ],
        "metrics": output.metrics,
    }


def _tensor_json(values: NDArray[Any]) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": "float32", "shape": list(values.shape)}


def write_forward_backward(output: tinker.ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput()
    message.loss_fn_output_type = output.loss_fn_output_type
    record = message.loss_fn_outputs.add()
    record.num_datums = len(output.loss_fn_outputs)
    for name in output.loss_fn_outputs[0]:
        rows = [np.asarray(row[name].to_numpy(), np.float32) for row in output.loss_fn_outputs]
        field = record.fields[name]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = np.concatenate(rows).tobytes()
        offsets = np.cumsum([0, *(row.nbytes for row in rows)])
        field.offsets = offsets.astype(np.int64).tobytes()
    for name, value in output.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def write_sample(response: tinker.SampleResponse) -> bytes:
    message = pb.SampleResponse()
    for sequence in response.sequences:
        written = message.sequences.add()
        stopped = sequence.stop_reason == "stop"
        written.stop_reason = pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH
        written.tokens = np.asarray(sequence.tokens_np, np.int32).tobytes()
        written.logprobs = np.asarray(sequence.logprobs_np, np.float32).tobytes()
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype(np.float32).tobytes()
    top = response.topk_prompt_logprobs_np
    if top is not None:
        length, k = top.token_ids.shape
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = length, k
        message.topk_prompt_logprobs.token_ids = top.token_ids.astype(np.int32).tobytes()
        message.topk_prompt_logprobs.logprobs = top.logprobs.astype(np.float32).tobytes()
    if response.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    return message.SerializeToString()


def _write_tensor(message: pb.Tensor, tensor: tinker.TensorData) -> None:
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(tensor.shape or [])
    values: Any = np.asarray(tensor.data, np.float32)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = values.tobytes()
        return
    message.sparse_csr.values = values.tobytes()
    message.sparse_csr.crow_indices = np.asarray(tensor.sparse_crow_indices, np.int64).tobytes()
    message.sparse_csr.col_indices = np.asarray(tensor.sparse_col_indices, np.int64).tobytes()
