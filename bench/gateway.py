"""What one chat completion costs the server, over a sampler that answers at once.

    python bench/gateway.py [--rounds N] [--calls N] [--litellm VENV]

A real server process, durable, whose sampler answers the same 16 tokens to everything. Processor time is the
operating system's own account of the server process. The reference is an empty FastAPI endpoint in a process
of its own with the same uvicorn settings, under the same load in the same round. Turns are those of 64
conversations at once, which grow by 100 tokens of prompt a turn.

With `--litellm` the proxy of LiteLLM, started from a virtual environment that has `litellm[proxy]`, stands in
front of an endpoint that answers a constant, and its throughput is set beside the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Response

from interchange import Server, empty_server, running, serve_empty, until_listening
from load import Load, connect, send_all
from tinkerscript.access_tokens import Roles
from tinkerscript.config import RunConfig
from tinkerscript.files import LEDGER_FILE
from tinkerscript.gateway.dialects import ChatCompletions
from tinkerscript.http_server import http_server
from tinkerscript.ledger import SqliteLedger
from tinkerscript.lifecycle import shorten_collections
from tinkerscript.limits import Totals
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.server.app import create_server
from tinkerscript.tokenizer import LightTokenizer

CHAT = "/v1/chat/completions"
CONTEXT = 65_536
CLAIMS = 64
SHORT, LONG = 100, 10_000
"""Tokens of the prompts."""

TURNS = 50
REPLY_TOKENS = 16
CONNECTIONS = (1, 16, 64)
POLL_S = 0.05
LITELLM_KEY = f"sk-{uuid4().hex}"
LITELLM_START_S = 180.0


class InstantSampler(Sampler):
    """Answers the same to everything."""

    def __init__(self, tokenizer: LightTokenizer) -> None:
        text = tokenizer.encode("The answer is " + "a" * REPLY_TOKENS)[: REPLY_TOKENS - 1]
        ids = [*text, *tokenizer.encode("<|im_end|>")]
        self._sequence = SampledSequence(
            sampled=pack_ids(ids), logprobs=pack_logprobs([-0.5] * len(ids)), stop_reason="stop"
        )

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        return SampleResult(sequences=[self._sequence] * request.num_samples, policy_version=0)

    def close(self) -> None:
        """Nothing waits."""


def model_folder_with_room(parent: Path) -> Path:
    """The tokenizer and chat format of the tiny model, with a long context; no weights."""
    folder = parent / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


def serve_gateway(run_dir: Path, port: int) -> None:
    """The server under load: all of it but the link's other end."""
    folder = model_folder_with_room(run_dir)
    unlimited = {"max_tokens_per_claim": 10**9}
    config = RunConfig.model_validate({"engine": {"model": str(folder)}, "interchange_server": unlimited})
    ledger = SqliteLedger(run_dir / LEDGER_FILE, durability=config.interchange_server.durability)
    sampler: Any = InstantSampler(LightTokenizer(folder))

    async def serve() -> None:
        server = await create_server(
            config,
            run_dir,
            ledger=ledger,
            roles=Roles(),
            remote_sampler=sampler,
            totals=Totals(calls=10**6),
        )
        server.link.bind(f"ipc://{run_dir}/link")
        background = asyncio.create_task(server.run())
        shorten_collections()
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listener:
            await http_server(server.app, config.interchange_server).serve(sockets=[listener])
        background.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def serve_constant(port: int) -> None:
    """What LiteLLM's proxy stands in front of: a constant, by FastAPI."""
    app = FastAPI()
    message = {"role": "assistant", "content": "The answer is " + "a" * REPLY_TOKENS}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    usage = {"prompt_tokens": SHORT, "completion_tokens": REPLY_TOKENS, "total_tokens": SHORT + REPLY_TOKENS}
    body = json.dumps(reply | {"choices": [choice], "usage": usage})

    @app.post(CHAT)
    async def constant() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(body, media_type="application/json")

    uvicorn.run(app, port=port, log_config=None, access_log=False, backlog=2048)


@contextmanager
def process(kind: str, port: int, run_dir: Path) -> Generator[Server]:
    command = [sys.executable, __file__, f"--serve-{kind}", str(port), "--run-dir", str(run_dir)]
    with running(command) as child:
        yield Server(child, port)


@contextmanager
def litellm_proxy(venv: Path, port: int, upstream: int, folder: Path) -> Generator[Server]:
    parameters = {
        "model": "openai/policy",
        "api_base": f"http://127.0.0.1:{upstream}/v1",
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": "policy", "litellm_params": parameters}],
        "general_settings": {"master_key": LITELLM_KEY},
    }
    (folder / "litellm.yaml").write_text(json.dumps(config))
    command = [str(venv / "bin" / "litellm"), "--config", str(folder / "litellm.yaml"), "--port", str(port)]
    with running([*command, "--host", "127.0.0.1", "--num_workers", "1"]) as child:
        yield Server(child, port)


class Texts:
    """User messages of a given length in prompt tokens, each different from the others."""

    def __init__(self) -> None:
        self._tokenizer = LightTokenizer(TINY_MODEL)
        self._frame = len(self._tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))

    def user(self, tokens: int) -> str:
        """A message whose whole prompt has about `tokens` tokens."""
        words = f"{uuid4().hex} What is 12 + 34 of all? "
        unit = len(self._tokenizer.encode(words * 10)) / 10
        return words * max(1, round((tokens - self._frame) / unit))

    def tokens(self, text: str) -> int:
        """Prompt tokens of one user message."""
        return self._frame + len(self._tokenizer.encode(text))


def chat_body(messages: Sequence[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"model": "policy", "messages": messages, "max_tokens": 64})


def single_turns(texts: Texts, tokens: int, count: int) -> list[bytes]:
    return [chat_body([{"role": "user", "content": texts.user(tokens)}]) for _ in range(count)]


async def claims_of(server: Server) -> list[str]:
    """The API keys of `CLAIMS` claims."""
    (line,) = await connect(server.port, 1)
    sample = {"input": "What is 12+34?", "target": "46"}
    keys: list[str] = []
    for number in range(CLAIMS):
        registered = {
            "episode_uuid": f"e{number}-{uuid4().hex}",
            "episode_type": "train",
            "client_uuid": "bench",
            "task_id": f"t{number}",
            "payload": {"task": "bench", "sample": sample},
        }
        await line.ask("/register_episode", msgspec.json.encode(registered))
        claim = {"client_uuid": "bench", "pool": "bench", "allow_discard_timeout": 3600.0}
        reply = msgspec.json.decode(await line.ask("/claim_episode", msgspec.json.encode(claim)))
        if not reply["success"]:
            raise SystemExit(f"no claim: {reply['fail_cause']}")
        keys.append(reply["openai_api_key"])
    line.close()
    return keys


class Measured:
    """Processor time and latencies of one load."""

    def __init__(self, cpu_us: float, load: Load) -> None:
        self.cpu_us = cpu_us
        self.load = load

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.load.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


async def measured(
    server: Server, path: str, bodies: list[bytes], *, connections: int, keys: Sequence[str] = ("",)
) -> Measured:
    cpu = server.cpu_s()
    load = await send_all(server.port, path, bodies, connections=connections, keys=keys)
    return Measured(1e6 * (server.cpu_s() - cpu) / len(bodies), load)


async def one_round(
    server: Server, empty: Server, texts: Texts, keys: list[str], calls: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    bodies = single_turns(texts, SHORT, calls)
    reference = await measured(empty, "/empty", bodies, connections=16)
    found["empty_us"] = reference.cpu_us
    for tokens, count in ((SHORT, calls), (LONG, max(calls // 20, 20))):
        for connections in CONNECTIONS:
            bodies = single_turns(texts, tokens, count)
            cost = await measured(server, CHAT, bodies, connections=connections, keys=keys)
            name = f"t{tokens}_c{connections}"
            found[f"{name}_us"] = cost.cpu_us
            found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = cost.percentile_ms(50), cost.percentile_ms(99)
            found[f"{name}_per_s"] = count / cost.load.seconds
    found["ratio"] = found[f"t{SHORT}_c16_us"] / found["empty_us"]
    return found | await turns(server, empty, texts, keys)


async def turns(server: Server, empty: Server, texts: Texts, keys: list[str]) -> dict[str, float]:
    """The cost of the first turns of conversations and of the last ones, and what reading them costs.

    Reading is what an empty endpoint spends on the same bodies, and the parsing of them.
    """
    conversations = [[{"role": "user", "content": texts.user(SHORT)}] for _ in keys]
    found: dict[str, float] = {}
    edge = 5
    costs: list[float] = []
    lines = await connect(server.port, len(keys))
    for turn in range(1, TURNS + 1):
        bodies = [chat_body(messages) for messages in conversations]
        cpu = server.cpu_s()
        replies = await asyncio.gather(
            *(line.ask(CHAT, body, key) for line, body, key in zip(lines, bodies, keys, strict=True))
        )
        costs.append(1e6 * (server.cpu_s() - cpu) / len(bodies))
        if turn in (1, TURNS):
            name = "first" if turn == 1 else "last"
            received = await measured(empty, "/empty", bodies * 10, connections=len(keys))
            found[f"{name}_read_us"] = received.cpu_us + reading_us(bodies)
            found[f"{name}_body_bytes"] = statistics.mean(map(len, bodies))
        for messages, reply in zip(conversations, replies, strict=True):
            messages.append(msgspec.json.decode(reply)["choices"][0]["message"])
            messages.append({"role": "user", "content": texts.user(SHORT)})
    for line in lines:
        line.close()
    found["first_turns_us"] = statistics.mean(costs[1 : 1 + edge])
    found["last_turns_us"] = statistics.mean(costs[-edge:])
    return found


def reading_us(bodies: list[bytes]) -> float:
    """Processor time to parse one of the requests, as the server does."""
    chat = ChatCompletions(LightTokenizer(TINY_MODEL))
    began = time.process_time()
    for body in bodies:
        chat.parse(body)
    return 1e6 * (time.process_time() - began) / len(bodies)


async def beside_litellm(
    server: Server, venv: Path, texts: Texts, keys: list[str], calls: int, port: int, folder: Path
) -> dict[str, float]:
    """Requests per second of the server and of LiteLLM's proxy, at 16 connections."""
    fewer = max(calls // 5, 100)
    with process("constant", port, folder) as constant:
        await until_listening(constant.port)
        with litellm_proxy(venv, port + 1, port, folder) as proxy:
            async with asyncio.timeout(LITELLM_START_S):
                await until_ready(proxy)
            warm_up, bodies = single_turns(texts, SHORT, fewer), single_turns(texts, SHORT, fewer)
            await measured(proxy, CHAT, warm_up, connections=16, keys=[LITELLM_KEY])
            theirs = await measured(proxy, CHAT, bodies, connections=16, keys=[LITELLM_KEY])
    ours = await measured(server, CHAT, single_turns(texts, SHORT, calls), connections=16, keys=keys)
    mine, other = calls / ours.load.seconds, fewer / theirs.load.seconds
    return {"per_s": mine, "litellm_per_s": other, "times": mine / other, "litellm_us": theirs.cpu_us}


async def until_ready(proxy: Server) -> None:
    """Until a call is answered; the proxy listens before it serves."""
    while proxy.process.is_running():
        try:
            (line,) = await connect(proxy.port, 1)
            await line.ask(CHAT, chat_body([{"role": "user", "content": "ready?"}]), LITELLM_KEY)
        except (OSError, RuntimeError):
            await asyncio.sleep(POLL_S)
        else:
            line.close()
            return
    raise SystemExit("LiteLLM's proxy did not start; try its command line by hand")


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}


def rounds_of(found: list[dict[str, float]]) -> Iterator[str]:
    yield json.dumps(summary(found))
    yield json.dumps({"ratios": [round(each["ratio"], 2) for each in found]})


async def bench(options: argparse.Namespace) -> None:
    texts = Texts()
    tokens = {n: texts.tokens(texts.user(n)) for n in (SHORT, LONG)}
    print(json.dumps({"prompt_tokens": tokens, "reply_tokens": REPLY_TOKENS}))
    port: int = options.port
    with tempfile.TemporaryDirectory() as name, empty_server(port) as empty:
        folder = Path(name)
        with process("gateway", port + 1, folder) as server:
            await until_listening(empty.port)
            await until_listening(server.port)
            keys = await claims_of(server)
            await one_round(server, empty, texts, keys, options.calls // 4)  # Warm-up.
            found = [
                await one_round(server, empty, texts, await claims_of(server), options.calls)
                for _ in range(options.rounds)
            ]
            for line in rounds_of(found):
                print(line)
            if options.litellm:
                beside = await beside_litellm(
                    server, options.litellm, texts, keys, options.calls, port + 2, folder
                )
                print(json.dumps({key: round(value, 2) for key, value in beside.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="short calls of each kind in a round")
    parser.add_argument("--litellm", type=Path, metavar="VENV", help="environment that has litellm[proxy]")
    parser.add_argument("--port", type=int, default=18_331, help="the first of a few that are used")
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    for kind in ("empty", "gateway", "constant"):
        parser.add_argument(f"--serve-{kind}", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_empty:
        serve_empty(options.serve_empty)
    elif options.serve_gateway:
        serve_gateway(options.run_dir, options.serve_gateway)
    elif options.serve_constant:
        serve_constant(options.serve_constant)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bench(options))


if __name__ == "__main__":
    main()
