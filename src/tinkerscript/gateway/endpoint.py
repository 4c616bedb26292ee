"""`Gateway` routes requests in every wire format to the model that they name. A role needs its exact name."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from tinkerscript.asgi import Caller, CallerDisconnectedError, Deferred, Responder
from tinkerscript.config import RunConfig, SamplingConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.claim_book import ClaimBook
from tinkerscript.gateway.conversation.session import in_thread_if
from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.gateway.dialects.dialect import Dialect, TokenCounter
from tinkerscript.gateway.dialects.openai import OpenAIDialect
from tinkerscript.gateway.named_model import ENCODER, LONG_BODY, NamedModel, route_of
from tinkerscript.gateway.outside_model import OutsideModel
from tinkerscript.gateway.outside_server import OutsideServer
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampled_model import SampledModel
from tinkerscript.model_folder import model_folder, model_name
from tinkerscript.protocol import POLICY
from tinkerscript.sampler import Sampler

MODELS_PATH = "/v1/models"


class _Named(msgspec.Struct):
    model: object = None


_READ_NAME = msgspec.json.Decoder(_Named).decode


class Gateway:
    router: APIRouter  # Under `/v1`.
    routes: dict[str, Responder]

    def __init__(
        self,
        policy: SampledModel,
        *,
        claims: ClaimBook,
        model_names: Sequence[str],
        roles: Mapping[str, NamedModel],
    ) -> None:
        self._policy = policy
        self._claims = claims
        self._roles = dict(roles)
        self._model_names = model_names
        self._started = int(time.time())
        self.routes = {}
        self.router = APIRouter(tags=["model"])
        for dialect in policy.dialects:
            self._add_dialect(dialect)
        for path in (MODELS_PATH, AGENT_PREFIX + MODELS_PATH):
            self.router.add_api_route(path, self._models, methods=["GET"], response_model=None)

    def forget(self, episode_uuid: str, attempt: int) -> None:
        for endpoint in (self._policy, *self._roles.values()):
            endpoint.forget(episode_uuid, attempt)

    def _add_dialect(self, dialect: Dialect[Any]) -> None:
        mode = "In agent mode: " if dialect.agent_mode else ""
        name = type(dialect).__name__ + ("ForAgents" if dialect.agent_mode else "")
        self._add_route(route_of(dialect), dialect, name, mode + (dialect.__doc__ or ""))
        if isinstance(dialect, TokenCounter):
            description = f"{mode}Count the prompt tokens of a `{dialect.path}` request. Nothing is sampled."
            self._add_route(route_of(dialect, counts=True), dialect, f"{name}Count", description)

    def _add_route(self, path: str, dialect: Dialect[Any], name: str, description: str) -> None:
        responder: Responder = partial(self._serve, path, dialect)

        async def endpoint() -> Response:
            return Deferred(responder)

        self.routes[path] = responder
        self.router.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, name=name, description=description
        )

    async def _serve(self, path: str, dialect: Dialect[Any], caller: Caller) -> None:
        try:
            body = await caller.body()
        except GatewayError as error:
            await caller.refuse(error.status, ENCODER.encode(dialect.error(error)))
            return
        except CallerDisconnectedError:
            return
        role = await in_thread_if(len(body) >= LONG_BODY, self._named_in, body) if self._roles else None
        await (role or self._policy).handle(path, caller, body)

    def _named_in(self, body: bytes) -> NamedModel | None:
        try:
            name = _READ_NAME(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return self._roles.get(name) if isinstance(name, str) else None

    async def _models(self) -> Response:
        """List the models that requests may name."""
        return Deferred(self._answer_models)

    async def _answer_models(self, caller: Caller) -> None:
        try:
            await self._claims.open(caller.key)
        except GatewayError as error:
            await caller.refuse(error.status, ENCODER.encode(OpenAIDialect.error(error)))
            return
        endpoints: dict[str, NamedModel] = dict.fromkeys(self._model_names, self._policy)
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "tinkerscript",
                **({"max_model_len": endpoint.max_context} if endpoint.max_context else {}),
            }
            for name, endpoint in {**endpoints, **self._roles}.items()
        ]
        await caller.reply(ENCODER.encode({"object": "list", "data": models}))


def create_gateway(
    *,
    claims: ClaimBook,
    sampler: Sampler,
    model_folder: Path,
    model_name: str,
    sampling: SamplingConfig,
    accepted_names: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    outside: Mapping[str, OutsideServer] | None = None,
    sampled: Mapping[str, ChatRenderer] | None = None,
    frozen: Collection[str] = (),
    no_images: Mapping[str, str] | None = None,
) -> Gateway:
    """Create the gateway for the model in `model_folder`, called `model_name` in replies.

    `accepted_names`: more names for the policy; with none and no roles, any name is accepted. `outside`:
    servers by role. `sampled`: chat formats of the roles that `sampler` serves. `frozen`: roles that follow
    the program's sampling parameters. `no_images`: why a role (empty: the policy) takes none.
    """
    no_images = no_images or {}
    names = list(dict.fromkeys([model_name, POLICY, model_folder.name, *accepted_names]))
    renderer = ChatRenderer(model_folder, chat_template_kwargs)
    roles: dict[str, NamedModel] = {
        role: OutsideModel(role, claims=claims, tokenizer=renderer.tokenizer, server=server)
        for role, server in (outside or {}).items()
    }
    for role, chats in (sampled or {}).items():
        roles[role] = SampledModel(
            role,
            claims=claims,
            sampler=sampler,
            renderer=chats,
            sampling=sampling.model_copy(update={"precedence": "program"}) if role in frozen else sampling,
            role=role,
            accepted_names=[role],
            no_images=no_images.get(role),
        )
    if taken := sorted(roles.keys() & set(names)):
        raise ConfigError(f"roles.{taken[0]}: requests use this name for the policy; choose another one")
    policy = SampledModel(
        model_name,
        claims=claims,
        sampler=sampler,
        renderer=renderer,
        sampling=sampling,
        accepted_names=names if accepted_names or roles else None,
        other_names=list(roles),
        no_images=no_images.get(""),
    )
    return Gateway(policy, claims=claims, model_names=names, roles=roles)


def gateway_of(
    config: RunConfig,
    *,
    claims: ClaimBook,
    sampler: Sampler,
    outside: Mapping[str, OutsideServer] | None = None,
) -> Gateway:
    folder = model_folder(config.engine.model)
    return create_gateway(
        claims=claims,
        sampler=sampler,
        model_folder=folder,
        model_name=model_name(folder),
        sampling=config.sampling,
        accepted_names=config.interchange_server.model_names,
        chat_template_kwargs=config.engine.chat_template_kwargs,
        outside=outside,
        sampled=None if outside is None else _sampled(config, folder),
        frozen=config.roles.keys() - config.trained_roles.keys(),
        no_images=config.no_images,
    )


def _sampled(config: RunConfig, folder: Path) -> dict[str, ChatRenderer]:
    found: dict[str, ChatRenderer] = {}
    for name, role in config.episode_roles.items():
        if role.kind == "outside":
            continue
        # Such roles use the policy's tokenizer.
        is_same = role.kind == "trained" or role.base_url or not role.model
        own = folder if is_same else model_folder(role.model)
        kwargs = config.engine.chat_template_kwargs if own == folder else None
        try:
            found[name] = ChatRenderer(own, kwargs)
        except ConfigError as error:
            raise ConfigError(f"roles.{name}.model: {error}") from error
    return found
