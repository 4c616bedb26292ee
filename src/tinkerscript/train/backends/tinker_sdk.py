"""Differences between versions of Tinker's SDK (0.24 to 0.38), and between servers.

Features are detected, not compared by version. All errors of the SDK become EngineErrors.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx
import tinker

from tinkerscript.errors import EngineError

T = TypeVar("T")

DESCRIPTION_TIMEOUT_S = 10.0

SDK_REMEDIES = {
    "JSON payload": (
        "the server answers in JSON, which tinker {version} no longer reads: "
        "pip install 'tinker>=0.24,<0.25', or use a server that answers in protobuf"
    ),
    "sample_sequence_ids": (
        "the server gives samples no ids (sample_sequence_ids), which tinker {version} needs: "
        "pip install 'tinker>=0.24,<0.26', or use a newer server"
    ),
}


def explained(error: BaseException) -> str:
    text = f"{error}" if isinstance(error, tinker.TinkerError) else f"{type(error).__name__}: {error}"
    for part, remedy in SDK_REMEDIES.items():
        if part in text:
            return remedy.format(version=tinker.__version__)
    return text


def connect(base_url: str) -> tinker.ServiceClient:
    """Blocks until the service answers."""
    try:
        service = tinker.ServiceClient(base_url=base_url or None)
        # The first use opens the session, which would block the event loop.
        getattr(service, "holder", None)
    except Exception as error:
        raise EngineError(
            f"engine.base_url: {base_url or 'the Tinker service'}: {explained(error)}"
        ) from error
    return service


async def capabilities(
    service: tinker.ServiceClient, base_url: str
) -> tinker.types.GetServerCapabilitiesResponse:
    """Ask the session's client up to 0.36, then the REST client."""
    rest_client: Any = getattr(tinker, "RestClient", None)
    if hasattr(rest_client, "get_server_capabilities"):
        rest = await asyncio.to_thread(rest_client, base_url=base_url or None)
        return await rest.get_server_capabilities()
    return await new_client(service, "get_server_capabilities")


async def new_client(owner: object, method: str, *args: object, **options: object) -> Any:
    """Call `owner.method(...)` without blocking.

    Up to 0.36, only `METHOD_async` does not block. Since 0.38 it is deprecated, and the method returns a
    future or a result.
    """
    call = getattr(owner, f"{method}_async", None)
    if call is None or hasattr(call, "__deprecated__"):
        call = getattr(owner, method)
    given = call(*args, **options)
    return await given if isinstance(given, Awaitable) else given


def awaitable(future: Awaitable[T] | concurrent.futures.Future[T]) -> Awaitable[T]:
    """Up to 0.36, sampling clients' futures cannot be awaited."""
    return future if isinstance(future, Awaitable) else asyncio.wrap_future(future)


async def close(service: tinker.ServiceClient, note: Callable[[str], None]) -> None:
    """If the session cannot be finished, stop its heartbeats and report why."""
    finish = getattr(service, "close", None)
    if finish is None:
        service.holder.close()
        return
    try:
        await finish("interrupted", detail="the trainer ended")
    except Exception as error:  # noqa: BLE001 (the run is over, and its result stands)
        note(f"the session was not finished at the service, which ends it by itself: {explained(error)}")


def lacks_of_sdk() -> list[str]:
    if hasattr(tinker.ServiceClient, "close"):
        return []
    return [
        f"tinker {tinker.__version__} cannot finish a session (0.27.2 and later can): the service frees the "
        "run when its heartbeats have stopped for a while"
    ]


async def lacks_of_server(base_url: str) -> list[str]:
    """Return what `openapi.json` lacks."""
    try:
        async with httpx.AsyncClient(timeout=DESCRIPTION_TIMEOUT_S) as client:
            response = await client.get(f"{base_url.rstrip('/')}/openapi.json")
    except httpx.HTTPError as error:
        raise EngineError(f"engine.base_url: {base_url}: {type(error).__name__}: {error}") from error
    if not response.is_success or "json" not in response.headers.get("content-type", ""):
        return []
    return described_lacks(response.json())


def described_lacks(description: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    paths = description.get("paths", {})
    if paths and not lacks_of_sdk() and not any(path.endswith("/finish") for path in paths):
        found.append("it cannot finish a session: it frees a run when its heartbeats stop")
    for path, inner, field, without in WANTED:
        names = _fields(description, path, inner)
        if names and field not in names:
            found.append(without)
    return found


WANTED = (
    ("optim_step", "adam_params", "grad_clip_norm", "it ignores training.grad_clip_norm: nothing is clipped"),
    ("optim_step", "adam_params", "weight_decay", "it ignores training.weight_decay"),
    ("create_model", "lora_config", "train_attn", "it ignores engine.lora.targets: it chooses the layers"),
    ("create_model", "lora_config", "seed", "it ignores the seed: an adapter starts at random"),
    ("asample", "sampling_params", "seed", "it ignores the seeds of samples: a run cannot be repeated"),
    ("asample", "sampling_params", "top_p", "it ignores top_p"),
    ("asample", "sampling_params", "top_k", "it ignores top_k"),
    (
        "asample",
        "",
        "prompt_logprobs",
        "it scores no prompts, which kl_penalty_coef and distillation need",
    ),
    ("save_weights", "", "overwrite", "it refuses to save a checkpoint under a name that a run has used"),
)
"""(endpoint, field of its body or "", field in there, consequence of its absence)"""


def _fields(description: Mapping[str, Any], path: str, inner: str) -> set[str]:
    operation = description.get("paths", {}).get(f"/api/v1/{path}", {}).get("post", {})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    properties = _properties(description, body)
    if not inner:
        return set(properties)
    return set(_properties(description, properties.get(inner, {})))


def _properties(description: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref", "")
    if reference:
        name = reference.rpartition("/")[2]
        schema = description.get("components", {}).get("schemas", {}).get(name, {})
    choices = [_properties(description, choice) for choice in schema.get("anyOf", [])]
    return schema.get("properties") or next((choice for choice in choices if choice), {})
