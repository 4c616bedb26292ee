"""Drives every bound of `limits.BOUNDS` to its limit and one beyond, alone and in combinations, over HTTP.

A shape is what one request may have; several are driven in one request, each at its limit, and at most one
beyond. A sum is what a claim, a pool or a client may add up to; it is driven alone, by as many requests as
that takes. What is at its limit passes: it is answered, or refused for something else, such as the model's
context. What is beyond is refused by the bound's name and its limit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from pydantic import ValidationError

from tinkerscript.limits import BOUNDS, SECTION
from tinkerscript.protocol import WEIGHT_SYNCING, WorkflowOutput

Body = dict[str, Any]

SETTINGS: dict[str, Any] = {
    "max_tokens_per_claim": 12_000,
    "max_reward": 1.0,
    "max_attempts": 100,
    "clients": [{"name": "bounded", "token_env": "BOUNDED_TOKEN", "max_claims": 3}],
}
"""Of the server that is driven: small enough to be reached, the tokens of a claim after its calls."""

TOKENS = {
    "BOUNDED_TOKEN": "token-of-the-bounded",
    "TINKERSCRIPT_CLIENT_TOKEN": "token-of-everybody",
    "TINKERSCRIPT_ADMIN_TOKEN": "token-of-the-admin",
}

OF_IMAGES = {"images", "image", "image's size"}
"""Bounds that only a server of a model with images has: `tests/unit/gateway/test_gateway_images.py`."""

LIMITS = {
    **{name: bound.limit for name, bound in BOUNDS.items() if bound.limit},
    **{f"{SECTION}.{name}": value for name, value in SETTINGS.items() if not isinstance(value, list)},
    **{f"{SECTION}.clients.{name}": value for name, value in SETTINGS["clients"][0].items()},
}


@dataclass
class Request:
    """One request, to be made worse."""

    path: str
    body: Body
    headers: dict[str, str] = field(default_factory=dict[str, str])
    padding: int = 0
    """Bytes of the whole body, if it is to have a certain length."""

    head: int = 0
    """Bytes of the path and the headers, if these are to have a certain length. Such a request has no body:
    to one that ends before its body has arrived, the answer may get lost."""

    def content(self) -> bytes:
        return json.dumps(self.body).encode().ljust(self.padding)


Shape = Callable[[Request, int], None]


@dataclass(frozen=True)
class Driver:
    """How a request comes to have so much of what one bound is about."""

    kind: str
    """Of the request."""

    slot: str
    """The part of it that is changed: no two drivers of a request change the same."""

    shape: Shape
    is_heavy: bool = False
    """Whether it takes long, so that it is not driven with every combination."""


def nested(depth: int) -> Any:
    """Lists inside each other: `depth` of them."""
    return [nested(depth - 1)] if depth else 1


def _put(name: str, value: Callable[[int], Any]) -> Shape:
    return lambda request, amount: request.body.update({name: value(amount)})


def _sets(name: str) -> Shape:
    """Sets something of the whole request."""
    return lambda request, amount: setattr(request, name, amount)


def _text(name: str) -> Shape:
    return _put(name, "x".__mul__)


def _tool(**more: Any) -> Body:
    return {"type": "function", "function": {"name": "t", **more}}


def _sized_tools(request: Request, amount: int) -> None:
    tool = _tool(description="")
    tool["function"]["description"] = "x" * (amount - len(msgspec.json.encode([tool])))
    request.body["tools"] = [tool]


def _reply(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}


def _sized(size: int) -> Body:
    """A schema of so many bytes."""
    schema = {"type": "object", "description": ""}
    return schema | {"description": "x" * (size - len(msgspec.json.encode(schema)))}


def _deep(depth: int) -> Body:
    return {"type": "object", "examples": nested(depth - 1)}


def _said(text: str = "1+1") -> Body:
    return {"role": "user", "content": text}


def _tool_calls(request: Request, ids: list[str]) -> None:
    calls = [{"id": each, "type": "function", "function": {"name": "t", "arguments": "{}"}} for each in ids]
    answered = {"role": "tool", "content": "2", "tool_call_id": ids[0]}
    request.body["messages"] = [_said(), {"role": "assistant", "content": "", "tool_calls": calls}, answered]


def _many_logprobs(request: Request, amount: int) -> None:
    request.body |= {"logprobs": True, "top_logprobs": 15, "n": 64, "max_tokens": 1024 + (amount > 2**20)}


def _top_logprobs(request: Request, amount: int) -> None:
    request.body |= {"logprobs": True, "top_logprobs": amount}


def _key(request: Request, amount: int) -> None:
    """A new one: the same key with another body is refused."""
    request.headers["Idempotency-Key"] = uuid4().hex.ljust(amount, "k")


def _output(name: str, value: Callable[[int], Any]) -> Shape:
    return lambda request, amount: request.body["workflow_output"].update({name: value(amount)})


def _sized_output(request: Request, amount: int) -> None:
    output = request.body["workflow_output"]
    output["metadata"] = {"text": ""}
    with suppress(ValidationError):  # Something else of it is beyond its bound.
        output["metadata"]["text"] = "x" * (amount - len(WorkflowOutput(**output).model_dump_json()))


def _nested_metric(amount: int) -> Any:
    return {"a": _nested_metric(amount - 1)} if amount else 1.0


def _payload(request: Request, amount: int) -> None:
    request.body["payload"] = {"a": "x" * (amount - len(json.dumps({"a": ""})))}


def _group(request: Request, amount: int) -> None:
    request.body["group_id"] = f"{request.body['client_uuid']}/".ljust(amount, "g")


def _uuid(request: Request, amount: int) -> None:
    request.body["episode_uuid"] = request.body["episode_uuid"].ljust(amount, "e")


def _registrations(request: Request, amount: int) -> None:
    request.body["episodes"] = request.body["episodes"] * amount


def _registered(request: Request, amount: int) -> None:
    """One registration after the other, with as many copies as it may have."""
    (first,), most = request.body["episodes"], LIMITS["copies"]
    request.body["episodes"] = [
        first | {"episode_uuid": f"{first['episode_uuid']}-{done}", "copies": min(most, amount - done)}
        for done in range(0, amount, most)
    ]


SHAPES: dict[str, Driver] = {
    "request head": Driver("head", "head", _sets("head")),
    "request body": Driver("chat", "whole", _sets("padding"), is_heavy=True),
    "Idempotency-Key": Driver("chat", "key", _key),
    "model": Driver("chat", "model", _text("model")),
    "messages": Driver("chat", "messages", _put("messages", lambda n: [_said("")] * n), is_heavy=True),
    "messages.name": Driver("chat", "messages", _put("messages", lambda n: [_said() | {"name": "n" * n}])),
    "tool_call_id": Driver("chat", "messages", lambda r, n: _tool_calls(r, ["i" * n])),
    "tool_calls": Driver("chat", "messages", lambda r, n: _tool_calls(r, [f"c{i}" for i in range(n)])),
    "tool name": Driver("chat", "tools", _put("tools", lambda n: [_tool(name="t" * n)])),
    "tools": Driver("chat", "tools", _put("tools", lambda n: [_tool(name=f"t{i}") for i in range(n)])),
    "tools as JSON": Driver("chat", "tools", _sized_tools, is_heavy=True),
    "tools nested": Driver("chat", "tools", _put("tools", lambda n: [_tool(parameters=_deep(n - 3))])),
    "reply schema as JSON": Driver("chat", "format", _put("response_format", lambda n: _reply(_sized(n)))),
    "reply schema nested": Driver("chat", "format", _put("response_format", lambda n: _reply(_deep(n)))),
    "n": Driver("chat", "n", _put("n", int), is_heavy=True),
    "stop": Driver("chat", "stop", _put("stop", lambda n: [f"s{i}" for i in range(n)])),
    "stop string": Driver("chat", "stop", _put("stop", lambda n: ["s" * n])),
    "stop_token_ids": Driver("chat", "stop ids", _put("stop_token_ids", lambda n: list(range(n)))),
    "max_tokens": Driver("chat", "max_tokens", _put("max_tokens", int), is_heavy=True),
    "top_k": Driver("chat", "top_k", _put("top_k", int)),
    "seed": Driver("chat", "seed", _put("seed", int)),
    "top_logprobs": Driver("chat", "logprobs", _top_logprobs),
    "logprobs": Driver("logprobs", "logprobs", _many_logprobs, is_heavy=True),
    "chat_template_kwargs": Driver(
        "chat", "template", _put("chat_template_kwargs", lambda n: {f"a{i}": 1 for i in range(n)})
    ),
    "previous_response_id": Driver(
        "responses", "previous", _put("previous_response_id", lambda n: "resp_" + "p" * n)
    ),
    "transcript": Driver("transcript", "whole", _sets("padding")),
    "workflow_output": Driver("end", "metadata", _sized_output),
    "metadata nested": Driver("end", "metadata", _output("metadata", lambda n: {"a": nested(n - 1)})),
    f"{SECTION}.max_reward": Driver("end", "reward", _output("reward", float)),
    "call_rewards": Driver(
        "end", "calls", _output("call_rewards", lambda n: {f"c{i}": 0 for i in range(n)}), is_heavy=True
    ),
    "log_metrics": Driver("end", "metrics", _output("log_metrics", lambda n: {f"m{i}": 1 for i in range(n)})),
    "log_metrics nested": Driver("end", "metrics", _output("log_metrics", _nested_metric)),
    "log_metrics name": Driver("end", "metrics", _output("log_metrics", lambda n: {"m" * n: 1})),
    "log_metrics value": Driver("end", "metrics", _output("log_metrics", lambda n: {"m": float(n)})),
    "failure.kind": Driver("abort", "kind", lambda r, n: r.body["failure"].update(kind="k" * n)),
    "client_uuid": Driver("claim", "client", _text("client_uuid")),
    "claim_request_id": Driver("claim", "request", _text("claim_request_id")),
    "pool": Driver("claim", "pool", _text("pool")),
    "allow_discard_timeout": Driver("claim", "lease", _put("allow_discard_timeout", int)),
    "wait_s": Driver("wait", "wait", _put("wait_s", int)),
    "max_episodes": Driver("claim", "number", _put("max_episodes", int)),
    "episode_uuid": Driver("register", "uuid", _uuid),
    "task_id": Driver("register", "task", _text("task_id")),
    "group_id": Driver("register", "group", _group),
    "copies": Driver("register", "copies", _put("copies", int), is_heavy=True),
    "group_size": Driver("register", "size", _put("group_size", int)),
    "payload": Driver("register", "payload", _payload, is_heavy=True),
    "payload nested": Driver("register", "payload", _put("payload", lambda n: {"a": nested(n - 1)})),
    "episodes": Driver("register many", "episodes", _registrations, is_heavy=True),
    "episodes with their copies": Driver("register many", "episodes", _registered, is_heavy=True),
}


@dataclass(frozen=True)
class Combination:
    """Shapes of one request, each at its limit, but for the one that is beyond."""

    names: tuple[str, ...]
    beyond: str = ""

    @property
    def kind(self) -> str:
        return SHAPES[self.names[0]].kind


def combinations(rng: random.Random, number: int) -> Iterator[Combination]:
    """Every shape alone, at its limit and beyond; then as many random ones as are left."""
    for name in SHAPES:
        yield Combination((name,))
        yield Combination((name,), name)
    light = [name for name, driver in SHAPES.items() if not driver.is_heavy]
    for _ in range(number - 2 * len(SHAPES)):
        first = SHAPES[rng.choice(light)]
        chosen: dict[str, str] = {}
        # Heavy ones rarely: most combinations are of what takes milliseconds.
        those = SHAPES if rng.random() < 0.02 else light
        alike = [name for name in those if SHAPES[name].kind == first.kind] or [first]
        for name in rng.sample(alike, min(len(alike), rng.randrange(2, 6))):
            chosen.setdefault(SHAPES[name].slot, name)  # type: ignore[index]
        names = tuple(chosen.values())
        yield Combination(names, rng.choice(("", *names)))


@dataclass
class Holder:
    """Who holds a token, and so claims' keys; asks a server."""

    http: httpx.AsyncClient
    rng: random.Random
    name: str
    key: str = ""
    """Of the claim that it uses now."""

    async def post(self, path: str, body: Body | bytes, *, key: str = "", **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key or TOKENS['TINKERSCRIPT_CLIENT_TOKEN']}"}
        headers |= {"Content-Type": "application/json"} | more.pop("headers", {})
        return await self.http.post(path, content=content, headers=headers, **more)

    async def get(self, request: Request) -> httpx.Response:
        """The answer to a request of a certain length."""
        sent = self.http.build_request("GET", request.path, headers={"X": ""})
        length = len(sent.url.raw_path) + sum(len(name) + len(value) + 4 for name, value in sent.headers.raw)
        sent.headers["X"] = "x" * (request.head - length)
        return await self.http.send(sent)

    def fresh(self) -> str:
        return f"{self.name}-{self.rng.randbytes(6).hex()}"

    async def claims(self, number: int = 1, client: str = "") -> list[Body]:
        """Claims of samples of its own, which nobody else works on."""
        pool = self.fresh()
        sample = {"episode_uuid": pool, "client_uuid": pool, "episode_type": "eval", "copies": number}
        assert (await self.post("/register_episode", sample)).status_code == 200
        asked = {"client_uuid": client or pool, "pool": pool, "sends_key": True, "max_episodes": number}
        reply = (
            await self.post("/claim_episode", asked | {"allow_discard_timeout": 600, "wait_s": 30})
        ).json()
        return [reply, *reply["more"]] if reply["success"] else []

    async def use_new_claim(self) -> None:
        (claim,) = await self.claims()
        self.key = claim["openai_api_key"]

    async def drive(self, combination: Combination) -> None:
        """Send one combination. Raises AssertionError if it is not answered as its bounds say."""
        request = await self.request_of(combination.kind)
        # What is to have a certain size in all comes last.
        for name in sorted(combination.names, key=lambda name: SHAPES[name].shape is _sized_output):
            SHAPES[name].shape(request, LIMITS[name] + (name == combination.beyond))
        if combination.kind == "head":
            check(await self.get(request), combination)
            return
        of_a_claim = combination.kind not in ("claim", "wait", "register", "register many")
        try:
            reply = await self.post(
                request.path,
                request.content(),
                key=self.key if of_a_claim else "",
                headers=request.headers,
                timeout=2.0 if combination.kind == "wait" and not combination.beyond else 120.0,
            )
        except httpx.ReadTimeout:
            assert combination.kind == "wait", combination
            return  # It waits, as it asked.
        check(reply, combination)
        if reply.status_code == 403 or (combination.kind in ("end", "abort") and reply.status_code == 200):
            self.key = ""  # The claim is over, or has used up what it may use.

    async def request_of(self, kind: str) -> Request:
        fresh = self.fresh()
        if kind in ("chat", "logprobs", "responses", "end", "abort", "transcript") and not self.key:
            await self.use_new_claim()
        match kind:
            case "chat" | "logprobs":
                body = {"model": "policy", "messages": [_said()], "max_tokens": 2}
                return Request("/v1/chat/completions", body)
            case "head":
                return Request("/health", {})
            case "responses":
                return Request("/v1/responses", {"model": "policy", "input": "1+1", "max_output_tokens": 2})
            case "transcript":
                return Request("/record_transcript", {})
            case "end":
                return Request("/end_episode", {"workflow_output": {"reward": 0.5}})
            case "abort":
                return Request("/abort_episode", {"failure": {"kind": "k"}})
            case "claim" | "wait":
                return Request("/claim_episode", {"client_uuid": fresh, "pool": fresh, "sends_key": True})
            case "register many":
                sample = {"episode_uuid": fresh, "client_uuid": fresh, "episode_type": "eval"}
                return Request("/register_episodes", {"episodes": [sample]})
            case _:
                sample = {"episode_uuid": fresh, "client_uuid": fresh, "episode_type": "eval"}
                return Request("/register_episode", sample | {"payload": {"a": 1}})


def reason_of(reply: httpx.Response) -> str:
    """What the reply says against the request; empty if it grants it."""
    body = reply.json()
    if refused := body.get("refused"):
        return str(next(iter(refused.values())))
    said = body.get("error") or body.get("failure_reason") or body.get("fail_cause") or ""
    return said["message"] if isinstance(said, dict) else said


def names(reply: httpx.Response, bound: str) -> bool:
    """Whether a reply refuses a request by this bound's name and its limit."""
    said, limit = reason_of(reply), LIMITS[bound]
    shown = (str(limit), f"{limit:g}")
    return bound.split()[0].removeprefix(f"{SECTION}.").rpartition(".")[2] in said and any(
        each in said for each in shown
    )


def check(reply: httpx.Response, combination: Combination) -> None:
    """Raises AssertionError if the reply is not what a combination's bounds ask for."""
    what = f"{combination}: {reply.status_code} {reply.text[:500]}"
    assert reply.status_code < 500, what
    if combination.beyond:
        assert reply.status_code == BOUNDS[combination.beyond].status, what
        assert names(reply, combination.beyond), what
        return
    if reply.status_code not in (200, 403):  # 403: the claim has used up what it may use.
        code = (reply.json().get("error") or {}).get("code")
        passes = ("context_length_exceeded", "unsupported_parameter", "previous_response_not_found")
        elsewhere = ("chat_template", "grammar", "is not a model call of this claim", "of the last copy, #")
        assert code in passes or any(words in reply.text for words in elsewhere), what


# Sums


async def _calls(holder: Holder, *, n: int, number: int, **more: Any) -> list[httpx.Response]:
    """Calls one after the other, all with the same body."""
    body = {"model": "policy", "messages": [_said()], "n": n, "max_tokens": 1} | more
    path = "/v1/chat/completions"
    return [await holder.post(path, body, key=holder.key, timeout=120) for _ in range(number)]


async def too_many_calls(holder: Holder) -> httpx.Response:
    await holder.use_new_claim()
    limit = LIMITS["calls of a claim"]
    sent = await _calls(holder, n=100, number=limit // 100)
    assert {reply.status_code for reply in sent} == {200}, sent[-1].text
    return (await _calls(holder, n=1, number=1))[0]


async def too_many_tokens(holder: Holder) -> httpx.Response:
    await holder.use_new_claim()
    for _ in range(LIMITS[f"{SECTION}.max_tokens_per_claim"]):
        (reply,) = await _calls(holder, n=16, number=1, max_tokens=64, stop_token_ids=[])
        if reply.status_code != 200:
            break
    return (await _calls(holder, n=16, number=1))[0]


async def too_many_failures(holder: Holder) -> httpx.Response:
    await holder.use_new_claim()
    sent = await _calls(holder, n=0, number=LIMITS["failed calls"])
    assert {reply.status_code for reply in sent} == {400}
    return (await _calls(holder, n=1, number=1))[0]


async def too_many_bytes(holder: Holder) -> httpx.Response:
    """By ids of tool calls: the chat format does not write them, so they cost no context."""
    await holder.use_new_claim()
    request = await holder.request_of("chat")
    request.body["max_tokens"] = 1
    for _ in range(LIMITS["recorded bytes"]):
        request.body["messages"] = [_said()]
        for index in range(30):
            id_ = f"{index}-{holder.rng.random()}".ljust(1024, "i")
            call = {"id": id_, "type": "function", "function": {"name": "t", "arguments": "{}"}}
            request.body["messages"] += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "", "tool_call_id": id_},
            ]
        reply = await holder.post(request.path, request.content(), key=holder.key, timeout=120)
        if reply.status_code != 200:
            return reply
    raise AssertionError("it records without end")


async def too_many_at_once(holder: Holder) -> httpx.Response:
    await holder.use_new_claim()
    # What takes longer to sample than it takes to arrive; each begins in its own way.
    texts = [f"{number} " + "1+1 " * 450 for number in range(4 * LIMITS["calls at once"])]
    sent = [_calls(holder, n=1, number=1, messages=[_said(text)]) for text in texts]
    replies = [reply for (reply,) in await asyncio.gather(*sent)]
    return max(replies, key=lambda reply: reply.status_code)


async def too_many_claims(holder: Holder) -> httpx.Response:
    limit, client, at_once = LIMITS["claims of a client"], holder.fresh(), LIMITS["max_episodes"]
    claims = [claim for _ in range(limit // at_once) for claim in await holder.claims(at_once, client)]
    assert len(claims) == limit
    more = holder.fresh()
    await holder.post(
        "/register_episode", {"episode_uuid": more, "client_uuid": more, "episode_type": "eval"}
    )
    asked = {"client_uuid": client, "pool": more, "sends_key": True}
    while True:
        reply = await holder.post("/claim_episode", asked)
        if not reason_of(reply).startswith(WEIGHT_SYNCING):
            return reply
        await asyncio.sleep(reply.json()["retry_after_s"])  # As a client does while a step is published.


async def too_many_in_pool(holder: Holder) -> httpx.Response:
    pool, copies = holder.fresh(), 1000
    sample = {"client_uuid": pool, "episode_type": "eval"}
    for number in range(LIMITS["episodes of the pool"] // copies):
        some = sample | {"episode_uuid": f"{pool}-{number}", "copies": copies}
        assert (await holder.post("/register_episode", some)).status_code == 200
    return await holder.post("/register_episode", sample | {"episode_uuid": f"{pool}-more"})


async def too_large_pool(holder: Holder) -> httpx.Response:
    pool, each = holder.fresh(), LIMITS["payload"]
    sample = {"client_uuid": pool, "episode_type": "eval", "payload": {"a": "x" * (each - 9)}}
    copies = LIMITS["payloads of the pool"] // each
    full = await holder.post(
        "/register_episode", sample | {"episode_uuid": pool, "copies": copies}, timeout=120
    )
    assert full.status_code == 200, full.text
    return await holder.post("/register_episode", sample | {"episode_uuid": f"{pool}-more"})


async def too_large_pools(holder: Holder) -> httpx.Response:
    """The last sum that is driven: nobody else can register more."""
    sample: Body = {"episode_type": "eval", "payload": {"a": "x" * (LIMITS["payload"] - 9)}}
    for _ in range(LIMITS["memory of all pools"] // LIMITS["payloads of the pool"] + 1):
        pool = holder.fresh()
        ours = sample | {"episode_uuid": pool, "client_uuid": pool, "copies": 60}
        reply = await holder.post("/register_episode", ours, timeout=120)
        if reply.status_code != 200:
            return reply
    raise AssertionError("it takes pools without end")


async def _as_bounded(holder: Holder, path: str, body: Body) -> httpx.Response:
    return await holder.post(path, body, key=TOKENS["BOUNDED_TOKEN"])


async def too_many_held(holder: Holder) -> httpx.Response:
    limit = LIMITS[f"{SECTION}.clients.max_claims"]
    for number in range(limit + 1):
        waiting = {"client_uuid": f"w{number}", "pool": "bounded", "wait_s": 3}
        asked = asyncio.create_task(_as_bounded(holder, "/claim_episode", waiting))
        done, _ = await asyncio.wait({asked}, timeout=0.5)
        if done:
            return asked.result()
    raise AssertionError("it waits for more than it may")


SUMS: dict[str, Callable[[Holder], Awaitable[httpx.Response]]] = {
    f"{SECTION}.clients.max_claims": too_many_held,
    "claims of a client": too_many_claims,
    "episodes of the pool": too_many_in_pool,
    "calls of a claim": too_many_calls,
    f"{SECTION}.max_tokens_per_claim": too_many_tokens,
    "failed calls": too_many_failures,
    "payloads of the pool": too_large_pool,
    "calls at once": too_many_at_once,
    "recorded bytes": too_many_bytes,
    "memory of all pools": too_large_pools,
}

SLOW = ("failed calls", "payloads of the pool", "calls at once", "recorded bytes", "memory of all pools")
"""Those that take many seconds."""


async def drive_sum(holder: Holder, name: str) -> None:
    """Raises AssertionError if what is beyond the bound is not refused by its name."""
    reply = await SUMS[name](holder)
    what = f"{name}: {reply.status_code} {reply.text[:500]}"
    assert reply.status_code == BOUNDS[name].status, what
    assert names(reply, name), what
