"""`python -m tinkerscript.processes.ray_agent` connects to a Ray cluster for a trainer.

It reads orders as JSON lines from standard input and writes outcomes to standard output. Each process of the
run is the child of an actor on its machine, which sends the output to the run's folder; the two end together.
Ray ends the actors when this process ends, or a minute after their node lost the cluster's head.
"""

# pyright: reportMissingImports=false
# Ray is an optional extra, which type checks lack.

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

HEAD_TIMEOUT_S = 10
"""Without the cluster's head for this long, Ray ends this process."""

PARENT_POLL_S = 5.0

STARTING_NOTE_S = 15.0  # After this long without room, tell the user.

UNAVAILABLE_S = 20.0  # A silent actor counts as dead after this.

# Ray's facts about every dead actor.
_FACT = re.compile(r"(class_name|actor_id|pid|name|namespace|ip): ")

KILL_S = 2.0

READ_BYTES = 65536
OBJECT_STORE_BYTES = 100 * 2**20  # A run does not use a private Ray's object store.

# Ray reads these variables at import.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_TIMEOUT_S))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray  # noqa: E402
from ray.exceptions import ActorUnavailableError, RayError  # noqa: E402
from ray.util.placement_group import PlacementGroup, placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402


class HostedProcess:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, order: dict[str, Any]) -> dict[str, Any]:
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        own = {"HOST": host, "PORT": str(port)}
        words = [own[word["slot"]] if isinstance(word, dict) else word for word in order["argv"]]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable if word == order["python"] else word for word in words),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            cwd=_folder_here(order["cwd"]),
            env={
                name: value
                for name, value in (os.environ | order["environ"]).items()
                if name not in order["withheld"]
            },
        )
        self._ending = asyncio.create_task(self._end_session())
        return {"host": host, "port": port, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    async def read(self) -> tuple[bytes, int | None]:
        """Return new output, and the exit code once all is read."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            data = await asyncio.wait_for(self._process.stdout.read(READ_BYTES), PARENT_POLL_S)
        except TimeoutError:
            return b"", None
        if data:
            return data, None
        return b"", await self._process.wait()

    async def ask_to_stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _end_session(self) -> None:
        # Descendants may hold the output open.
        assert self._process is not None
        await self._process.wait()
        self.kill()

    def kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Agent:
    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._group: PlacementGroup | None = None
        self._bundles: dict[str, int] = {}
        self._actors: dict[int, Any] = {}
        self._placed: set[int] = set()

        self._late: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._actor_class: Any = ray.remote(HostedProcess)

    def send(self, **message: Any) -> None:
        os.write(self._answers, json.dumps(message).encode() + b"\n")

    async def run(self, orders: asyncio.StreamReader) -> None:
        settings = json.loads(await orders.readline() or b"null")
        if settings is None:
            return
        _connect(settings)
        node_id = ray.get_runtime_context().get_node_id()
        reserving = asyncio.create_task(self._reserve(settings, node_id))
        ending = asyncio.create_task(orders.readline())
        await asyncio.wait({reserving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reserving.done():  # Standard input ended: no order comes before `ready`.
            reserving.cancel()
            return
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        gpus = reserving.result()
        self.send(ready={"address": ray.util.get_node_ip_address(), "nodes": nodes, "gpus": gpus})
        line = await ending
        while line:
            self._follow(json.loads(line))
            line = await orders.readline()

    async def _reserve(self, settings: dict[str, Any], node_id: str) -> list[str]:
        beside = [each for each in settings["processes"] if each["beside"]]
        others = [each for each in settings["processes"] if not each["beside"]]
        wanted = [_resources(sum(each["cpus"] for each in beside), sum(each["gpus"] for each in beside))]
        selectors: list[dict[str, str]] = [{"ray.io/node-id": node_id}]
        for each in others:
            if resources := _resources(each["cpus"], each["gpus"]):
                self._bundles[each["name"]] = len(wanted)
                wanted.append(resources)
                selectors.append({})
        group = self._group = placement_group(wanted, strategy="PACK", bundle_label_selector=selectors)
        deadline = time.monotonic() + settings["timeout_s"]
        report_at = time.monotonic() + STARTING_NOTE_S
        while not await asyncio.to_thread(group.wait, 1):
            room = f"the run needs {_sums(wanted)}; Ray has {_of_cluster()}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"there is no room within {settings['timeout_s']:g} s: {room}")
            if time.monotonic() > report_at:
                self.send(note=f"waiting for room in the Ray cluster: {room}")
                report_at = float("inf")
        if not wanted[0].get("GPU"):
            return []
        self._holder = self._actor({"name": "", "cpus": 0, "gpus": wanted[0]["GPU"]}, bundle=0)
        return await self._holder.gpus.remote()

    def _actor(self, order: dict[str, Any], bundle: int | None) -> Any:
        placed: Any = "SPREAD"
        if bundle is not None:
            placed = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        options = {"num_cpus": order["cpus"], "num_gpus": order["gpus"], "scheduling_strategy": placed}
        return self._actor_class.options(**options, max_concurrency=8).remote()

    def _follow(self, order: dict[str, Any]) -> None:
        match order:
            case {"start": number}:
                actor = self._actors[number] = self._actor(order, self._bundles.get(order["name"]))
                self._begin(self._keep(number, actor, order))
            case {"stop": number} if number in self._placed:
                self._actors[number].ask_to_stop.remote()
            case {"kill": number} if number in self._placed:
                self._begin(self._kill(number, self._actors[number]))
            case {"stop": number} | {"kill": number}:
                self._end(number, -signal.SIGTERM, "")
            case _:
                pass

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill(self, number: int, actor: Any) -> None:
        # The actor itself may not respond.
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(_value(actor.kill.remote()), KILL_S)
        self._end(number, -signal.SIGKILL, "")

    async def _keep(self, number: int, actor: Any, order: dict[str, Any]) -> None:
        log = Path(order["log"])
        try:
            facts = await self._place(actor, order)
            if number not in self._actors:
                return
            self._placed.add(number)
            self.send(started=number, host=facts["host"], port=facts["port"])
            code = await self._copy_output(actor, log)
            self._end(number, code, "")
        except RayError as error:
            if number not in self._actors:  # An order ended it.
                return
            why = _why(error)
            _append(log, f"ray: {why}\n".encode())
            self._end(number, -signal.SIGKILL, why.splitlines()[0].split(". ")[0])

    async def _place(self, actor: Any, order: dict[str, Any]) -> dict[str, Any]:
        starting = asyncio.ensure_future(_value(actor.start.remote(order)))
        done, _ = await asyncio.wait({starting}, timeout=STARTING_NOTE_S)
        if not done:
            if not self._late:
                asyncio.get_running_loop().call_later(1.0, self._report_delays)
            self._late.append(order)
        return await starting

    def _report_delays(self) -> None:
        # Orders that wait for the same reason share one message.
        late, self._late = self._late, []
        free = ray.available_resources()
        needs = [_resources(order["cpus"], order["gpus"]) for order in late]
        fits = [all(free.get(name, 0) >= amount for name, amount in need.items()) for need in needs]
        if starting := [order["name"] for order, fit in zip(late, fits, strict=True) if fit]:
            self.send(note=f"still being started: {_some(starting)}")
        if waiting := [order["name"] for order, fit in zip(late, fits, strict=True) if not fit]:
            total = _sums([need for need, fit in zip(needs, fits, strict=True) if not fit])
            self.send(note=f"waiting for {total}: {_some(waiting)}; Ray has {_of_cluster()}")

    async def _copy_output(self, actor: Any, log: Path) -> int:
        silent_since: float | None = None
        while True:
            try:
                data, code = await _value(actor.read.remote())
            except ActorUnavailableError:  # It may only be slow.
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > UNAVAILABLE_S:
                    raise
                await asyncio.sleep(0.5)
                continue
            silent_since = None
            _append(log, data)
            if code is not None:
                return code

    def _end(self, number: int, code: int, why: str) -> None:
        actor = self._actors.pop(number, None)
        self._placed.discard(number)
        if actor is not None:
            ray.kill(actor)
            self.send(ended=number, code=code, why=why)


async def _value(reference: Any) -> Any:
    return await reference


def _connect(settings: dict[str, Any]) -> None:
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    if settings["address"]:
        ray.init(address=settings["address"], **quiet)
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, -(-settings["cpus"] // 1)),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **quiet,
    )


def _folder_here(folder: str) -> str | None:
    return folder if Path(folder).is_dir() else None


def _append(log: Path, data: bytes) -> None:
    if data:
        with log.open("ab") as file:
            file.write(data)


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _sums(bundles: list[dict[str, float]]) -> str:
    totals = {name: sum(each.get(name, 0) for each in bundles) for name in ("CPU", "GPU")}
    return " and ".join(f"{total:g} {name}" for name, total in totals.items() if total)


def _of_cluster() -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = (f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
    return " and ".join(parts)


def _why(error: Exception) -> str:
    """Return Ray's words, the most informative first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines[1:] if not _FACT.match(line)]
    return "\n".join([*telling, *lines[:1]]) or type(error).__name__


async def main(answers: int) -> int:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    agent = Agent(answers)
    try:
        await agent.run(orders)
    except Exception as error:  # noqa: BLE001 - The trainer reports it to the user.
        agent.send(failed=f"{type(error).__name__}: {error}")
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.dup(1)
    os.dup2(2, 1)  # Ray's prints go to the log.
    sys.exit(asyncio.run(main(own)))
