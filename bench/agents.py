"""Many agents at once: what the server takes of processor and memory, and how long it keeps a call.

    python bench/agents.py [--agents N ...] [--processes N ...] [--turns N] [--think S] [--context N]

The real commands: the interchange server (SQLite), its gateway processes, and a trainer on the link, whose
sampler answers 64 tokens after 0.3 s and 10 ms a token. Each agent holds one claim and one conversation,
which begins with one of two system prompts of 2,000 tokens and grows each turn by as much as to reach
`--context` tokens with the last. Before each turn it thinks, half as long to one and a half times as long as
`--think` seconds. Random choices come from a seed. The trainer registers all their episodes at once. A
latency is what a call took beyond its sampling. Beside the agents go 20 heartbeats a second on one
connection; then, with the agents' conversations in memory, calls with prompts of 128k tokens, and 200
requests of 3.3 MB at once: 550,000 characters, each written as `\\uXXXX`, as Python's json does with what is
not ASCII, which are 440,000 tokens of the tiny model.

Memory an agent is what the server's processes have taken (USS) since all claims were made. Processor time is
the operating system's account, for the server and each gateway process. The longest stall is the most
processor time of an event loop's thread between two turns (`watched`), in any of them, without what the host
of a virtual machine took meanwhile (`stolen`), of which the longest time is told too: it is null, and part of
the stalls, for who may not have real-time priority.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import psutil
import uvloop

from gateway import InstantSampler
from interchange import POLL_S, Trainer, claim_bodies
from load import Connection, connect
from stolen import Stolen, may_be_real_time
from tinkerscript.addresses import ServerInfo, read_server_info
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.trainer_link.trainer_end import TrainerLink

CONTEXT = 2_000_000
SYSTEM_TOKENS = 2_000
SYSTEMS = 2
CHUNKS = 48
REPLY_TOKENS = 64
FIRST_TOKEN_S, TOKEN_S = 0.3, 0.01
SAMPLING_S = FIRST_TOKEN_S + TOKEN_S * REPLY_TOKENS
HEARTBEAT_S = 0.05
LONG_TOKENS, LONG_CALLS = 128_000, 10
BIG_BYTES = 3_300_000
LEASE_S = 7000.0
IDLE_S = 60.0
"""After which an agent opens a new connection: the server closes those that are idle for 75 s."""

START_S = 120.0
REGISTERING = "registering"
"""The file with the time at which the trainer began to register the episodes."""

SEED = 7


def serve_trainer(run_dir: Path, episodes: int) -> None:
    """The trainer's process: registers the episodes, and samples slowly."""

    async def serve() -> None:
        info = read_server_info(run_dir)
        assert info is not None
        instant = InstantSampler(LightTokenizer(TINY_MODEL))

        async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
            await asyncio.sleep(FIRST_TOKEN_S + TOKEN_S * request.max_tokens)
            return await instant.sample(request)

        async with TrainerLink(
            info.link_address, trainer_id=uuid4().hex, model="none", sampler=sample
        ) as link:
            (run_dir / REGISTERING).write_text(str(time.time()))
            await Trainer(link).register(episodes)
            await asyncio.to_thread(sys.stdin.read)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class Texts:
    """Seeded texts of about so many tokens, as JSON strings without their quotes."""

    def __init__(self) -> None:
        self._tokenizer = LightTokenizer(TINY_MODEL)
        self._random = random.Random(SEED)
        letters = "etaoinshrdlucmfwypvbgk"
        self._words = [
            "".join(self._random.choices(letters, k=self._random.randint(2, 9))) for _ in range(4000)
        ]
        sample = " ".join(self._random.choices(self._words, k=2000))
        self._words_per_token = 2000 / len(self._tokenizer.encode(sample))

    def text(self, tokens: int) -> bytes:
        words = self._random.choices(self._words, k=max(1, round(tokens * self._words_per_token)))
        return " ".join(words).encode()


class Agent:
    """One claim and its conversation."""

    def __init__(self, number: int, claim: dict[str, Any], system: bytes, chunks: list[bytes]) -> None:
        url = urlsplit(claim["openai_base_url"])
        self.port = url.port or 0
        self.path = f"{url.path}/chat/completions"
        self.key: str = claim["openai_api_key"]
        self.uuid: str = claim["episode_uuid"]
        self._number = number
        self._chunks = chunks
        self._said: list[bytes] = [system]
        """Fragments of the body: those of the texts that all agents share are shared here too."""

        self._random = random.Random(SEED * 1_000_003 + number)

    def body(self) -> bytes:
        """The next request: the conversation and a new message."""
        turn = len(self._said)
        self._said.append(b',{"role":"user","content":"[%d.%d] ' % (self._number, turn))
        self._said.append(self._random.choice(self._chunks))
        self._said.append(b'"}')
        head = b'{"model":"policy","max_tokens":%d,"messages":[' % REPLY_TOKENS
        return b"".join((head, *self._said, b"]}"))

    def hear(self, reply: bytes) -> None:
        message = msgspec.json.decode(reply)["choices"][0]["message"]
        self._said.append(b"," + msgspec.json.encode(message))

    def thinks_s(self, mean_s: float) -> float:
        return self._random.uniform(0.5, 1.5) * mean_s


@dataclass
class Fleet:
    """The server's processes, under load."""

    info: ServerInfo
    notes: Path
    """Of the processes' event loops."""

    stolen: list[Path]
    """What the host took, by processor; empty if that cannot be known."""

    @property
    def port(self) -> int:
        return int(self.info.url.rpartition(":")[2])

    def processes(self) -> list[psutil.Process]:
        """The server, and its gateway processes."""
        server = psutil.Process(self.info.pid)
        return [server, *(each for each in server.children() if "gateway" in each.cmdline())]

    def cpu_s(self) -> list[float]:
        return [sum(each.cpu_times()[:2]) for each in self.processes()]

    def memory_bytes(self) -> int:
        return sum(each.memory_full_info().uss for each in self.processes())

    def stalls(self, since: float) -> dict[str, float | None]:
        """The longest of any of the processes, 0 if all turns were short; and of the host."""
        stolen = Stolen.noted_in(self.stolen)
        own = 0.0
        for note in map(json.loads, self.notes.read_text().splitlines()):
            if note["at"] > since:
                host_ms = 1e3 * stolen.between(note["at"] - 1e-3 * note["wall_ms"], note["at"])
                own = max(own, note["cpu_ms"] - host_ms)
        host = round(1e3 * stolen.longest(since), 1) if self.stolen else None
        return {"longest_stall_ms": round(own, 1), "longest_of_host_ms": host}


@contextmanager
def child(command: list[str], environ: dict[str, str]) -> Generator[None]:
    with (Path(tempfile.gettempdir()) / "agents-bench.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | environ
        )
        try:
            yield
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def fleet(run_dir: Path, processes: int, agents: int) -> Generator[Fleet]:
    """A server with so many gateway processes, and its trainer."""
    model, notes = run_dir / "model", run_dir / "loops.jsonl"
    model.mkdir()
    notes.touch()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((TINY_MODEL / name).read_bytes())
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    section = {
        "interchange_server_port": 0,
        "processes": processes,
        "call_timeout_s": 3600.0,
        "max_claim_s": LEASE_S,
    }
    run = RunConfig.model_validate({"engine": {"model": str(model)}, "interchange_server": section})
    (run_dir / "config.yaml").write_text(dump_config(run))
    watched = {"PYTHONPATH": str(Path(__file__).parent / "watched"), "LOOP_NOTES": str(notes)}
    command = [sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(run_dir)]
    with child(command, watched):
        until = time.monotonic() + START_S
        while (info := read_server_info(run_dir)) is None:
            if time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(POLL_S)
        trainer = [sys.executable, __file__, "--serve-trainer", str(run_dir), str(agents)]
        with child(trainer, {}), stolen_noted(run_dir) as stolen:
            yield Fleet(info, notes, stolen)


@contextmanager
def stolen_noted(folder: Path) -> Generator[list[Path]]:
    """The files in which it is noted what the host takes; none if that cannot be known."""
    files = dict[int, Path]()
    with ExitStack() as stack:
        if may_be_real_time():
            files = {cpu: folder / f"stolen-{cpu}.jsonl" for cpu in os.sched_getaffinity(0)}
        for cpu, file in files.items():
            file.touch()
            script = str(Path(__file__).with_name("stolen.py"))
            stack.enter_context(child([sys.executable, script, str(file), str(cpu)], {}))
        yield list(files.values())


async def claimed(port: int, number: int) -> list[dict[str, Any]]:
    """The claims of so many episodes."""
    (line,) = await connect(port, 1)
    claims: list[dict[str, Any]] = []
    for body in claim_bodies(10 * number, allow_discard_timeout=LEASE_S, max_episodes=100, wait_s=5.0):
        reply = msgspec.json.decode(await line.ask("/claim_episode", body))
        if reply["success"]:
            claims += [reply, *reply.pop("more")]
        if len(claims) >= number:
            break
    line.close()
    return claims


class Latencies:
    """Of one kind of request, in seconds."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def ms(self, percent: int) -> float:
        if len(self.all) < 2:
            return 0.0
        return round(1000 * statistics.quantiles(self.all, n=100, method="inclusive")[percent - 1], 1)


@asynccontextmanager
async def heartbeats(port: int, agent: Agent) -> AsyncGenerator[Latencies]:
    """20 a second while the context is open."""
    found, over = Latencies(), False

    async def beat() -> None:
        (line,) = await connect(port, 1)
        body = msgspec.json.encode({"episode_uuid": agent.uuid, "client_uuid": "client-0"})
        while not over:
            sent = time.perf_counter()
            await line.ask("/heartbeat_episode", body, agent.key)
            found.all.append(time.perf_counter() - sent)
            await asyncio.sleep(max(0.0, sent + HEARTBEAT_S - time.perf_counter()))
        line.close()

    beating = asyncio.create_task(beat())
    try:
        yield found
    finally:
        over = True
        await beating


async def live(agent: Agent, options: argparse.Namespace, take: Callable[[float], None]) -> None:
    """All turns of one agent, on a connection of its own."""
    await asyncio.sleep(agent.thinks_s(options.think))
    (line,) = await connect(agent.port, 1)
    for turn in range(options.turns):
        if turn:
            thinks_s = agent.thinks_s(options.think)
            await asyncio.sleep(thinks_s)
            if thinks_s > IDLE_S:
                line.close()
                (line,) = await connect(agent.port, 1)
        body = agent.body()
        sent = time.perf_counter()
        reply = await line.ask(agent.path, body, agent.key)
        take(time.perf_counter() - sent - SAMPLING_S)
        agent.hear(reply)
    line.close()


async def agents_at_work(fleet: Fleet, agents: list[Agent], options: argparse.Namespace) -> dict[str, Any]:
    """The main measurement."""
    latencies, before, memory = Latencies(), fleet.cpu_s(), fleet.memory_bytes()
    began, since = time.perf_counter(), time.time()
    async with heartbeats(fleet.port, agents[0]) as beats:
        await asyncio.gather(*(live(each, options, latencies.all.append) for each in agents))
    seconds, after = time.perf_counter() - began, fleet.cpu_s()
    calls = len(latencies.all)
    return {
        "calls_per_s": round(calls / seconds, 1),
        "p50_ms": latencies.ms(50),
        "p99_ms": latencies.ms(99),
        "heartbeat_p95_ms": beats.ms(95),
        "cpu_us_per_call": [round(1e6 * (b - a) / calls) for a, b in zip(before, after, strict=True)],
        "kB_per_agent": round((fleet.memory_bytes() - memory) / len(agents) / 1000, 1),
        **fleet.stalls(since),
    }


def chat(text: bytes) -> bytes:
    return b'{"model":"policy","max_tokens":1,"messages":[{"role":"user","content":"%b"}]}' % text


async def sent(fleet: Fleet, agents: list[Agent], bodies: list[bytes], connections: int) -> dict[str, Any]:
    """Bodies, one for each of the agents in turn, with heartbeats beside them."""
    latencies, since = Latencies(), time.time()
    source: Iterator[tuple[Agent, bytes]] = iter(
        [(agents[number % len(agents)], body) for number, body in enumerate(bodies)]
    )

    async def drain() -> None:
        """One request at a time, on one connection to each process."""
        lines: dict[int, Connection] = {}
        for agent, body in source:
            if agent.port not in lines:
                (lines[agent.port],) = await connect(agent.port, 1)
            began = time.perf_counter()
            await lines[agent.port].ask(agent.path, body, agent.key)
            latencies.all.append(time.perf_counter() - began - FIRST_TOKEN_S - TOKEN_S)
        for line in lines.values():
            line.close()

    began = time.perf_counter()
    async with heartbeats(fleet.port, agents[0]) as beats:
        await asyncio.gather(*(drain() for _ in range(connections)))
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 1),
        "p50_ms": latencies.ms(50),
        "heartbeat_p95_ms": beats.ms(95),
        **fleet.stalls(since),
    }


async def measure(number: int, processes: int, options: argparse.Namespace) -> None:
    texts = Texts()
    systems = [b'{"role":"system","content":"%b"}' % texts.text(SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    turn_tokens = (options.context - SYSTEM_TOKENS) // options.turns - REPLY_TOKENS
    chunks = [texts.text(turn_tokens) for _ in range(CHUNKS)]
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), processes, number) as under_load:
        claims = await claimed(under_load.port, number)
        begun = under_load.stalls(float((Path(folder) / REGISTERING).read_text()))
        agents = [Agent(n, claim, systems[n % SYSTEMS], chunks) for n, claim in enumerate(claims)]
        for agent in agents[:: max(1, number // 8)]:  # Which waits for the processes.
            await live_once(agent)
        print(json.dumps({"agents": number, "processes": processes, "load": os.getloadavg()}))
        print(json.dumps({"registered_and_claimed": begun}))
        print(json.dumps(await agents_at_work(under_load, agents, options)), flush=True)
        if options.long:
            bodies = [chat(texts.text(LONG_TOKENS)) for _ in range(options.long)]
            print(json.dumps({"prompts_of_128k": await sent(under_load, agents, bodies, 2)}), flush=True)
        if options.big:
            text = b"".join(b"\\u%04x" % letter for letter in texts.text(BIG_BYTES)[: BIG_BYTES // 6])
            bodies = [chat(b"%d " % n + text) for n in range(options.big)]
            print(json.dumps({"requests_of_3.3_MB": await sent(under_load, agents, bodies, 200)}), flush=True)


async def live_once(agent: Agent) -> None:
    (line,) = await connect(agent.port, 1)
    await line.ask(agent.path, chat(b"ready?"), agent.key)
    line.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--think", type=float, default=30.0, help="mean, in seconds")
    parser.add_argument("--context", type=int, default=32_000, help="tokens of the last prompt")
    parser.add_argument("--long", type=int, default=LONG_CALLS, help="calls with prompts of 128k tokens")
    parser.add_argument("--big", type=int, default=200, help="requests of 3.3 MB")
    parser.add_argument("--serve-trainer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_trainer:
        run_dir, episodes = options.serve_trainer
        serve_trainer(Path(run_dir), int(episodes))
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    for number in options.agents:
        for processes in options.processes:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(number, processes, options))


if __name__ == "__main__":
    main()
