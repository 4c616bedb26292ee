"""Sampling by vLLM through the whole path, against the same load sent to vLLM directly.

    python bench/vllm.py [--connections N ...] [--rounds N] [--per-connection N] [--python PYTHON]

`tinkerscript train` starts one replica of a model of 20 million parameters. Chats with prompts of 500 tokens
and answers of 128 go, in turn, to the interchange server, with the keys of claimed episodes (then through the
trainer to vLLM), and to vLLM's own chat endpoint, for the same adapter and with the token ids and log
probabilities that training needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import yaml

from gateway import CHAT, Texts, claims_of
from interchange import Server
from load import Load, send_all
from models import make_model
from tinkerscript.addresses import read_server_info

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
PROMPT, ANSWER = 500, 128
RANK = 16
START_S = 600.0
POLL_S = 0.2


def settings(folder: Path, model: Path, python: Path) -> dict[str, Any]:
    """A run whose samples are the clients' own; it waits for their results as long as the load lasts."""
    return {
        "experiment_dir": str(folder / "run"),
        "engine": {"model": str(model), "lora": {"rank": RANK}},
        "inference": {
            "backend": "vllm",
            "launch": {
                "replicas": 1,
                "python": str(python),
                "args": ["--distributed-executor-backend=uni"],
                "env": {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": 0,
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "VLLM_CPU_KVCACHE_SPACE": 2,
                },
            },
        },
        "interchange_server": {
            "interchange_server_port": 0,
            "max_tokens_per_claim": 10**9,
        },
        "sampling": {"max_tokens": ANSWER},
        "training": {"steps": 1, "groups_per_step": 1000, "group_size": 2},
        "evaluation": {"episodes": 0},
        "workers": {"count": 0},
    }


@contextmanager
def run_of(config: Path, log: Path) -> Generator[psutil.Process]:
    with log.open("wb") as output:
        # It ends with this process, however that ends.
        with_parent = [sys.executable, "-m", "tinkerscript.processes.with_parent"]
        command = [*with_parent, sys.executable, "-m", "tinkerscript", "train", str(config)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    with process:
        yield psutil.Process(process.pid)


def until_proved(run_dir: Path, process: psutil.Process, log: Path) -> None:
    """Until the replica has proved that it samples from the first version."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        path = run_dir / "replicas.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if any(json.loads(line)["version"] == 0 for line in lines):
            return
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(POLL_S)
    raise SystemExit(f"the run did not start:\n{log.read_text()[-3000:]}")


@dataclass(frozen=True)
class Vllm:
    """The replica, as the run calls it."""

    port: int
    api_key: str

    @classmethod
    def below(cls, process: psutil.Process) -> Vllm:
        for child in process.children(recursive=True):
            command = child.cmdline()
            if "vllm.entrypoints.openai.api_server" in command:
                return cls(int(command[command.index("--port") + 1]), child.environ()["VLLM_API_KEY"])
        raise SystemExit("no vLLM runs below the trainer")

    def adapter(self) -> str:
        """The name under which it has the run's only version."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        reply = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", headers=headers, timeout=30)
        (name,) = [each["id"] for each in reply.json()["data"] if each["id"].startswith("policy-")]
        return name


def bodies(texts: Texts, count: int, model: str, **more: Any) -> list[bytes]:
    """Chats of different prompts of `PROMPT` tokens, for answers of `ANSWER`."""
    return [
        msgspec.json.encode(
            {
                "model": model,
                "messages": [{"role": "user", "content": texts.user(PROMPT)}],
                "max_tokens": ANSWER,
                "temperature": 1.0,
                **more,
            }
        )
        for _ in range(count)
    ]


def figures(load: Load) -> dict[str, float]:
    sampled = sum(msgspec.json.decode(reply)["usage"]["completion_tokens"] for reply in load.replies)
    ordered = sorted(load.latencies_s)
    return {
        "tokens_per_s": sampled / load.seconds,
        "p50_s": statistics.median(ordered),
        "p99_s": ordered[round(0.99 * (len(ordered) - 1))],
        "tokens_per_answer": sampled / len(load.replies),
    }


async def measure(gateway: Server, vllm: Vllm, adapter: str, options: argparse.Namespace) -> None:
    texts, keys = Texts(), await claims_of(gateway)
    print(json.dumps({"prompt_tokens": texts.tokens(texts.user(PROMPT)), "adapter": adapter}), flush=True)

    async def through(connections: int, count: int) -> Load:
        own = bodies(texts, count, "policy")
        return await send_all(gateway.port, CHAT, own, connections=connections, keys=keys)

    async def directly(connections: int, count: int) -> Load:
        own = bodies(texts, count, adapter, logprobs=True, return_token_ids=True)
        return await send_all(vllm.port, CHAT, own, connections=connections, keys=[vllm.api_key])

    await through(16, 32)
    await directly(16, 32)
    for connections in options.connections:
        found: dict[str, list[dict[str, float]]] = {"through": [], "directly": []}
        for number in range(options.rounds):
            ways = [("through", through), ("directly", directly)]
            for name, way in ways if number % 2 == 0 else ways[::-1]:
                load = await way(connections, connections * options.per_connection)
                found[name].append(figures(load))
        shares = [
            one["tokens_per_s"] / other["tokens_per_s"]
            for one, other in zip(found["through"], found["directly"], strict=True)
        ]
        for name, rounds in found.items():
            medians = {key: round(statistics.median(each[key] for each in rounds), 3) for key in rounds[0]}
            print(json.dumps({"connections": connections, "way": name, **medians}), flush=True)
        median = round(statistics.median(shares), 3)
        print(json.dumps({"share": median, "rounds": [round(each, 3) for each in shares]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-connection", type=int, default=1, help="chats of each connection in a round")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of vLLM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "20m")
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings(folder, model, options.python.absolute())))
        log = folder / "run.log"
        with run_of(config, log) as process:
            until_proved(folder / "run", process, log)
            info = read_server_info(folder / "run")
            assert info is not None
            port = int(info.url.rsplit(":", 1)[1])
            vllm = Vllm.below(process)
            asyncio.run(measure(Server(process, port), vllm, vllm.adapter(), options))


if __name__ == "__main__":
    main()
