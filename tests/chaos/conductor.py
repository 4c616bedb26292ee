"""Runs workers, server, trainer and proxy together, kills them in every state, and says what was hit.

Hostile clients with valid tokens are among the workers. Every other worker has a token of its own too.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import processes
from checker import Evidence
from evidence import HOSTILE, JOURNAL, KILLS, ORACLE, WORKERS, Lines, Row, Tail, read_lines, read_rows
from hostile import WAYS, token_variable
from processes import ChaosError, Victim

from tinkerscript.server.auth import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.server.store.sqlite import STORE_FILE

STATES = ("claimed", "mid-call", "ended, unacknowledged", "acknowledgement in flight")
KINDS = ("server", "trainer", "worker")

AIM_S = 2.0
"""Seconds to wait for the state that a kill aims at."""

PROCESSES = (("slow",), ("liar", "hoarder", "registrar"), ("thief", "impostor", "failer", "babbler"))
"""The hostile clients, by the process that they share."""

HOSTILE_LIMITS = {"max_claims": 6, "registrations_per_minute": 600, "bytes_per_minute": 100_000_000}


def hostile_accounts() -> list[dict[str, Any]]:
    """The hostile clients' entries in `interchange_server.clients`; the impostor has the shared token."""
    return [
        {"name": who, "token_env": token_variable(who)} | HOSTILE_LIMITS for who in WAYS if who != "impostor"
    ]


def hostile_tokens() -> dict[str, str]:
    """Their tokens, with the shared one and the admin's."""
    return {token_variable(who): f"token-of-{who}" for who in WAYS} | {
        CLIENT_TOKEN: "token-of-everybody",
        ADMIN_TOKEN: "token-of-the-admin",
    }


@dataclass(frozen=True)
class Plan:
    """How large a run is."""

    seed: int
    episodes: int
    workers: int
    kills_of_each_kind: int
    turns: int = 3
    concurrency: int = 4
    sample_delay_s: float = 0.05
    max_claim_s: float = 20.0
    limit_s: float = 1500.0


class Watch:
    """What is in which state now, from the files."""

    def __init__(self, run_dir: Path) -> None:
        self._store = run_dir / STORE_FILE
        self._oracle = Tail(run_dir / ORACLE)
        self._journal = Tail(run_dir / JOURNAL)
        self._samples: dict[str, str] = {}
        """Samples in flight -> the worker that waits for them."""

        self.journalled: set[str] = set()
        """The trainer's own episodes that have ended."""

    def update(self) -> None:
        for line in self._oracle.new():
            if line["event"] == "begin":
                self._samples[line["sample"]] = line["worker"]
            else:  # `end`, or `cancelled`
                self._samples.pop(line["sample"], None)
        outcomes = (
            line for line in self._journal.new() if line["event"] in ("ended", "failed") and not line["pool"]
        )
        self.journalled.update(line["episode"] for line in outcomes)

    def forget_samples(self) -> None:
        """The trainer is dead: what it was sampling will never end."""
        self._samples.clear()

    def states(self, worker: str = "") -> Counter[str]:
        """How many episodes (of one worker, if it is named) are in each state of `STATES`."""
        self.update()
        rows = read_rows(self._store, "claimed", "ended") if self._store.exists() else dict[str, Row]()
        mine = {name: row for name, row in rows.items() if not worker or _is(row.clients[-1], worker)}
        ended = {name for name, row in mine.items() if row.state == "ended"}
        return Counter(
            {
                "claimed": len(mine) - len(ended),
                "mid-call": sum(not worker or _is(name, worker) for name in self._samples.values()),
                "ended, unacknowledged": len(ended - self.journalled),
                "acknowledgement in flight": len(ended & self.journalled),
            }
        )


@dataclass
class Conductor:
    """One run."""

    plan: Plan
    run_dir: Path
    table: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter[str]() for kind in KINDS})
    kills: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.plan.seed)
        self._log = Lines(self.run_dir / KILLS)
        self._victims: list[Victim] = []
        self._watch = Watch(self.run_dir)
        self._began = time.monotonic()

    def run(self) -> Evidence:
        """Returns what the run left. Raises ChaosError if it does not come to its end."""
        processes.write_config(
            self.run_dir,
            clients=[*hostile_accounts(), *self._worker_accounts()],
            max_claim_s=self.plan.max_claim_s,
            max_connections=200,
            header_timeout_s=2.0,
            body_timeout_s=4.0,
        )
        # Not in run_dir: the path of a socket has 107 characters at most.
        with TemporaryDirectory(prefix="chaos-") as sockets, processes.ended_at_last(self._victims):
            self._start(Path(sockets))
            for number, (kind, state) in enumerate(self._schedule()):
                self._until_ended(self._share(number))
                self._strike(kind, state)
            self._until_ended(self.plan.episodes)
            self._until_settled()
        self.seconds = time.monotonic() - self._began
        return self.evidence()

    def evidence(self) -> Evidence:
        registered = [f"e{number:05d}" for number in range(self.plan.episodes)]
        return Evidence(
            episodes=registered,
            turns=self.plan.turns,
            journal=read_lines(self.run_dir / JOURNAL),
            oracle=read_lines(self.run_dir / ORACLE),
            confirmed=read_lines(self.run_dir / WORKERS),
            hostile=read_lines(self.run_dir / HOSTILE),
            states={name: row.state for name, row in read_rows(self.run_dir / STORE_FILE).items()},
        )

    def _start(self, sockets: Path) -> None:
        port, link = _free_port(), f"ipc://{sockets}/proxy.ipc"
        self.server = self._add(processes.server(self.run_dir, self._tokens()))
        processes.listening(self.run_dir, self.server)
        proxy_options = ("--http-port", port, "--link-in", link, "--seed", self.plan.seed)
        self._proxy = self._add(processes.script("proxy", self.run_dir, *proxy_options))
        trainer_options = ("--link", link, "--episodes", self.plan.episodes)
        delay = ("--delay-s", self.plan.sample_delay_s)
        self.trainer = self._add(processes.script("trainer", self.run_dir, *trainer_options, *delay))
        self.workers = [self._add(self._worker(number, port)) for number in range(self.plan.workers)]
        for number, ways in enumerate(PROCESSES):
            options = ("--seed", self.plan.seed, *(word for way in ways for word in ("--as", way)))
            name = f"hostile-{number}"
            self._add(processes.script("hostile", self.run_dir, *options, log=name, environ=hostile_tokens()))

    def _worker(self, number: int, port: int) -> Victim:
        name = f"worker-{number}"
        url = f"http://127.0.0.1:{port}"
        options = ("--server", url, "--name", name, "--turns", self.plan.turns)
        face = ["--runner"] if number % 4 >= 2 else []
        concurrency = ("--concurrency", self.plan.concurrency)
        owner = ("--owner", f"{name}/{name}") if self._has_account(number) else ()
        token = self._tokens()[_worker_token(number) if owner else CLIENT_TOKEN]
        return processes.script(
            *("worker", self.run_dir, *options, *concurrency, *face, *owner),
            log=name,
            environ={CLIENT_TOKEN: token},
        )

    def _has_account(self, number: int) -> bool:
        """Whether a worker has a token of its own."""
        return number % 2 == 0

    def _worker_accounts(self) -> list[dict[str, Any]]:
        """Those of honest workers: each may hold just what it works on."""
        return [
            {
                "name": f"worker-{number}",
                "token_env": _worker_token(number),
                "max_claims": self.plan.concurrency,
            }
            for number in range(self.plan.workers)
            if self._has_account(number)
        ]

    def _tokens(self) -> dict[str, str]:
        own = {_worker_token(number): f"token-of-worker-{number}" for number in range(self.plan.workers)}
        return hostile_tokens() | own

    def _add(self, victim: Victim) -> Victim:
        self._victims.append(victim)
        victim.start()
        return victim

    def _schedule(self) -> list[tuple[str, str]]:
        """Which kind is killed in which state, in a random order that the seed decides."""
        aims = [
            (kind, STATES[number % len(STATES)])
            for kind in KINDS
            for number in range(self.plan.kills_of_each_kind)
        ]
        self._rng.shuffle(aims)
        return aims

    def _share(self, number: int) -> int:
        """Episodes that have ended before this kill: the kills are spread over the run."""
        kills = len(KINDS) * self.plan.kills_of_each_kind
        return 1 + number * int(self.plan.episodes * 0.9) // kills

    def _strike(self, kind: str, aim: str) -> None:
        """Kill one process when it is in the state aimed at, if that comes soon; then start it again."""
        victim = {"server": self.server, "trainer": self.trainer}.get(kind) or self._rng.choice(self.workers)
        worker = victim.name if kind == "worker" else ""
        deadline = time.monotonic() + AIM_S
        while not self._watch.states(worker)[aim] and time.monotonic() < deadline:
            time.sleep(0.001)
        victim.kill()
        hit = self._watch.states(worker)
        self.kills[kind] += 1
        self.table[kind].update(state for state in STATES if hit[state])
        self._log.write(kind=kind, victim=victim.name, aim=aim, at_s=time.monotonic() - self._began, hit=hit)
        if kind == "trainer":
            self._watch.forget_samples()
        time.sleep(self._rng.uniform(0, 0.3))  # How long the process is away is part of the trial.
        victim.start()

    def _until_ended(self, episodes: int) -> None:
        self._until(lambda: len(self._watch.journalled) >= episodes, f"{episodes} episodes ended")

    def _until_settled(self) -> None:
        """Until the server knows that the trainer has everything."""
        self._until(
            lambda: not read_rows(self.run_dir / STORE_FILE, "registered", "claimed", "ended"),
            "every outcome acknowledged",
        )

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        while True:
            self._watch.update()
            if condition():
                return
            for victim in self._victims:
                victim.check()
            if time.monotonic() - self._began > self.plan.limit_s:
                raise ChaosError(self._diagnosis(what))
            time.sleep(0.01)

    def _diagnosis(self, what: str) -> str:
        rows = read_rows(self.run_dir / STORE_FILE)
        open_rows = {name: row for name, row in rows.items() if row.state not in ("accepted", "failed")}
        return (
            f"waited for: {what}; not within {self.plan.limit_s:g} s. "
            f"In states: {dict(self._watch.states())}; "
            f"open episodes: {dict(list(open_rows.items())[:5])}; logs in {self.run_dir}"
        )

    def report(self) -> str:
        """The kills' table."""
        width = max(map(len, STATES))
        head = f"{'killed in the state':{width}} " + "".join(f"{kind:>9}" for kind in KINDS)
        rows = [
            f"{state:{width}} " + "".join(f"{self.table[kind][state]:>9}" for kind in KINDS)
            for state in STATES
        ]
        total = f"{'kills in all':{width}} " + "".join(f"{self.kills[kind]:>9}" for kind in KINDS)
        return "\n".join([head, *rows, total])

    def never_hit(self) -> list[str]:
        """Cells of the table that are empty."""
        return [f"{kind}: {state}" for kind in KINDS for state in STATES if not self.table[kind][state]]


def hostilities(run_dir: Path) -> str:
    """What each hostile client did, as a table."""
    done = read_lines(run_dir / HOSTILE)
    events = ("claimed", "failed", "handed in", "registered", "attack", "error", "socket")
    head = f"{'hostile client':14} " + "".join(f"{event:>11}" for event in events)
    counts = Counter((line["who"], line["event"]) for line in done)
    rows = [f"{who:14} " + "".join(f"{counts[who, event]:>11}" for event in events) for who in WAYS]
    statuses = Counter(line["status"] for line in done if line["event"] == "attack")
    answers = ", ".join(f"{status}: {times}" for status, times in sorted(statuses.items()))
    return "\n".join([head, *rows, f"attacks answered with {answers}"])


def _is(owner: str, worker: str) -> bool:
    """Whether an owner of claims is this worker."""
    return owner.rpartition("/")[2] == worker


def _worker_token(number: int) -> str:
    """The environment variable of a worker's own token."""
    return f"TOKEN_OF_WORKER_{number}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
