"""Runs workers, server, trainer and proxy together, kills them in every state, and says what was hit.

Hostile clients with valid tokens are among the workers. Every other worker has a token of its own too.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import processes
from checker import Evidence
from evidence import (
    HOSTILE,
    KILLS,
    ORACLE,
    SCHEMA,
    TRAINER,
    WORKERS,
    Lines,
    Query,
    Tail,
    open_episodes,
    query_database,
    query_file,
    read_ledger,
    read_lines,
    unsettled,
)
from hostile import WAYS, token_variable
from processes import ChaosError, Victim
from trainer import GROUP_SIZE
from worker import CONCURRENCY, TURNS

from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.files import LEDGER_FILE
from tinkerscript.processes.launcher import free_port

if TYPE_CHECKING:
    from postgres_server import PostgresServer

STATES = ("claimed", "mid-call", "ended, not received", "received, not used", "commit in flight")
KINDS = ("server", "trainer", "worker")
FAILOVER_KINDS = (*KINDS, "database", "stopped server")
"""With two servers on one database."""

STOP_S = (3.5, 6.0)
"""How long a server is stopped: longer than its lease lasts."""

AIM_S = 2.0
"""Seconds to wait for the state that a kill aims at."""

COMMIT_S = 60.0
"""For that of a commit: there is one a step."""

PROCESSES = (
    ("slow", "silent", "endless"),
    ("liar", "hoarder", "registrar", "smuggler"),
    ("thief", "impostor", "failer", "babbler"),
)
CLAIMERS = (("liar", "hoarder", "registrar", "thief", "impostor", "failer"),)
"""Those after the results of episodes, not after the server's time."""

HOSTILE_LIMITS = {"max_claims": 6}


def hostile_accounts() -> list[dict[str, Any]]:
    """The hostile clients' entries in `interchange_server.clients`; the impostor has the shared token."""
    return [
        {"name": who, "token_env": token_variable(who)} | HOSTILE_LIMITS for who in WAYS if who != "impostor"
    ]


def hostile_clients(run_dir: Path, ways: Sequence[Sequence[str]], **options: Any) -> list[Victim]:
    """A process for each of `ways`, not started."""
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [
        processes.script(
            *("hostile", run_dir, *given, *(word for way in those for word in ("--as", way))),
            log=f"hostile-{number}",
            environ=hostile_tokens(),
        )
        for number, those in enumerate(ways)
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
    max_policy_lag: int
    max_claim_s: float = 20.0
    limit_s: float = 1500.0
    hostile: Sequence[Sequence[str]] = PROCESSES
    """The hostile clients, by the process that they share."""

    @property
    def groups(self) -> int:
        """That train in each step."""
        return max(2, self.episodes // GROUP_SIZE // 16)

    @property
    def steps(self) -> int:
        return -(-self.episodes // (self.groups * GROUP_SIZE))


class Watch:
    """What is in which state now, from the files."""

    def __init__(self, run_dir: Path, query: Query) -> None:
        self._query = query
        self._oracle = Tail(run_dir / ORACLE)
        self._trainer = Tail(run_dir / TRAINER)
        self._samples: dict[str, str] = {}
        """Samples in flight -> the worker that waits for them."""

        self._committing: set[str] = set()
        self._held: set[str] = set()
        """What has reached this process of the trainer."""

        self.received: set[str] = set()
        """The trainer's own episodes whose outcome has reached it."""

        self.is_finished = False

    def update(self) -> None:
        for line in self._oracle.new():
            if line["event"] == "begin":
                self._samples[line["sample"]] = line["worker"]
            elif line["event"] in ("end", "cancelled"):
                self._samples.pop(line["sample"], None)
        for line in self._trainer.new():
            match line["event"]:
                case "resumed":
                    self._held, self._committing = set(), set()
                case "received" if not line["pool"]:
                    self._held.add(line["episode"])
                    self.received.add(line["episode"])
                case "commits":
                    self._committing = set(line["episodes"])
                case "committed":
                    self._committing = set()
                case "finished":
                    self.is_finished = True
                case _:
                    pass

    def forget_samples(self) -> None:
        """The trainer is dead: what it was sampling will never end."""
        self._samples.clear()

    def states(self, worker: str = "") -> Counter[str]:
        """How many episodes (of one worker, if it is named) are in each state of `STATES`."""
        self.update()
        found = open_episodes(self._query)
        mine = {name: each for name, each in found.items() if not worker or _is(each.client, worker)}
        ended = {name for name, each in mine.items() if each.state == "ended"}
        return Counter(
            {
                "claimed": len(mine) - len(ended),
                "mid-call": sum(not worker or _is(name, worker) for name in self._samples.values()),
                "ended, not received": len(ended - self._held),
                "received, not used": len((ended & self._held) - self._committing),
                "commit in flight": len(ended & self._committing),
            }
        )


@dataclass
class Conductor:
    """One run."""

    plan: Plan
    run_dir: Path
    database: PostgresServer | None = None
    """With one there are two servers, of which one serves."""

    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter[str]))
    kills: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.plan.seed)
        self._log = Lines(self.run_dir / KILLS)
        self._victims: list[Victim] = []
        if self.database is None:
            self.kinds, self.folders = KINDS, [self.run_dir]
            self._query: Query = partial(query_file, self.run_dir / LEDGER_FILE)
        else:
            self.kinds, self.folders = FAILOVER_KINDS, [self.run_dir / "one", self.run_dir / "two"]
            self._query = partial(query_database, self.database)
        self._watch = Watch(self.run_dir, self._query)
        self._began = time.monotonic()

    def run(self) -> Evidence:
        """Returns what the run left. Raises ChaosError if it does not come to its end."""
        for folder in self.folders:
            processes.write_config(
                folder,
                clients=[*hostile_accounts(), *self._worker_accounts()],
                max_claim_s=self.plan.max_claim_s,
                **({} if self.database is None else {"store": f"{self.database.url}?schema={SCHEMA}"}),
            )
        # Not in run_dir: the path of a socket has 107 characters at most.
        with TemporaryDirectory(prefix="chaos-") as sockets, processes.ended_at_last(self._victims):
            self._start(Path(sockets))
            for number, (kind, state) in enumerate(self._schedule()):
                share = self._share(number)
                self._until(lambda share=share: len(self._watch.received) >= share, f"{share} outcomes")
                self._strike(kind, state)
            self._until(lambda: self._watch.is_finished, "the last step")
            self._until(lambda: not unsettled(self._query), "every episode ended, and used or left out")
        self.seconds = time.monotonic() - self._began
        return self.evidence()

    def evidence(self) -> Evidence:
        return Evidence(
            steps=self.plan.steps,
            per_step=self.plan.groups * GROUP_SIZE,
            turns=TURNS,
            max_policy_lag=self.plan.max_policy_lag,
            ledger=read_ledger(self._query),
            trainer=read_lines(self.run_dir / TRAINER),
            oracle=read_lines(self.run_dir / ORACLE),
            confirmed=read_lines(self.run_dir / WORKERS),
            hostile=[
                line
                for line in read_lines(self.run_dir / HOSTILE)
                if self.database is None or line["event"] != "unanswered"  # A stopped server answers nobody.
            ],
        )

    def _start(self, sockets: Path) -> None:
        port, link = free_port(), f"ipc://{sockets}/link.ipc"
        plan, run_dir = self.plan, self.run_dir
        self.servers = [self._add(processes.server(folder, self._tokens())) for folder in self.folders]
        processes.until(lambda: processes.serving_info(run_dir) is not None, "a server's start")
        self._add(
            processes.script("proxy", run_dir, "--http-port", port, "--link", link, "--seed", plan.seed)
        )
        size = ("--steps", plan.steps, "--groups", plan.groups, "--max-policy-lag", plan.max_policy_lag)
        self.trainer = self._add(processes.script("trainer", run_dir, "--link", link, *size))
        # Hostile clients register names that the trainer must have by then.
        trainers = Tail(run_dir / TRAINER)
        processes.until(
            lambda: any(line["event"] == "registered" for line in trainers.new()),
            "the trainer's first episodes",
        )
        self.workers = [self._add(self._worker(number, port)) for number in range(self.plan.workers)]
        for victim in hostile_clients(self.run_dir, self.plan.hostile, seed=self.plan.seed):
            self._add(victim)

    def _worker(self, number: int, port: int) -> Victim:
        name = f"worker-{number}"
        options = ["--server", f"http://127.0.0.1:{port}", "--name", name]
        options += ["--runner"] if number % 4 >= 2 else []
        options += ["--owner", f"{name}/{name}"] if self._has_account(number) else []
        token = self._tokens()[_worker_token(number) if self._has_account(number) else CLIENT_TOKEN]
        environ = {CLIENT_TOKEN: token}
        return processes.script("worker", self.run_dir, *options, log=name, environ=environ)

    def _has_account(self, number: int) -> bool:
        """Whether a worker has a token of its own."""
        return number % 2 == 0

    def _worker_accounts(self) -> list[dict[str, Any]]:
        """Those of honest workers: each may hold just what it works on."""
        return [
            {"name": f"worker-{number}", "token_env": _worker_token(number), "max_claims": CONCURRENCY}
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
            for kind in self.kinds
            for number in range(self.plan.kills_of_each_kind)
        ]
        self._rng.shuffle(aims)
        return aims

    def _share(self, number: int) -> int:
        """Outcomes that the trainer has before this kill: the kills are spread over the run."""
        kills = len(self.kinds) * self.plan.kills_of_each_kind
        return 1 + number * int(self.plan.episodes * 0.9) // kills

    def _strike(self, kind: str, aim: str) -> None:
        """Kill one process when it is in the state aimed at, if that comes soon; then start it again."""
        victim = self._victim(kind)
        worker = victim.name if kind == "worker" else ""
        deadline = time.monotonic() + (COMMIT_S if aim == STATES[-1] else AIM_S)
        while not self._watch.states(worker)[aim] and time.monotonic() < deadline:
            if self._watch.is_finished:
                break
            time.sleep(0.001)
        hit = self._watch.states()
        self._harm(kind, victim)
        if kind != "database":  # It says nothing once it is dead.
            hit = self._watch.states(worker)
        self.kills[kind] += 1
        self.table[kind].update(state for state in STATES if hit[state])
        self._log.write(kind=kind, victim=victim.name, aim=aim, at_s=time.monotonic() - self._began, hit=hit)
        if kind == "trainer":
            self._watch.forget_samples()
        # How long the process is away is part of the trial.
        time.sleep(self._rng.uniform(*STOP_S) if kind == "stopped server" else self._rng.uniform(0, 0.3))
        self._heal(kind, victim)

    def _victim(self, kind: str) -> Victim:
        """For what happens to a server: the one that serves."""
        if kind == "trainer":
            return self.trainer
        if kind == "worker":
            return self._rng.choice(self.workers)
        info = processes.serving_info(self.run_dir)
        serving = [each for each in self.servers if each.process and info and each.process.pid == info.pid]
        return (serving or self.servers)[0]

    def _harm(self, kind: str, victim: Victim) -> None:
        if kind == "stopped server":
            victim.send(signal.SIGSTOP)
        else:
            (self.database if kind == "database" and self.database else victim).kill()

    def _heal(self, kind: str, victim: Victim) -> None:
        if kind == "stopped server":
            victim.send(signal.SIGCONT)
        else:
            (self.database if kind == "database" and self.database else victim).start()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        while True:
            self._watch.update()
            if condition():
                return
            for victim in self._victims:
                victim.check()
            if time.monotonic() - self._began > self.plan.limit_s:
                raise ChaosError(
                    f"waited for: {what}; not within {self.plan.limit_s:g} s. "
                    f"In states: {dict(self._watch.states())}; "
                    f"open episodes: {unsettled(self._query)[:5]}; logs in {self.run_dir}"
                )
            time.sleep(0.01)

    def table_of_kills(self) -> str:
        rows = [("killed in the state", self.kinds)]
        rows += [(state, [self.table[kind][state] for kind in self.kinds]) for state in STATES]
        rows += [("kills in all", [self.kills[kind] for kind in self.kinds])]
        return "\n".join(f"{name:19} " + "".join(f"{cell:>15}" for cell in cells) for name, cells in rows)

    def print_report(self, evidence: Evidence, faults: Sequence[str]) -> None:
        plan = self.plan
        print(f"\nseed {plan.seed}: {plan.episodes} episodes, {plan.workers} workers, {self.seconds:.0f} s")
        print(self.table_of_kills())
        print(hostilities(self.run_dir))
        claims = sum(line["attempt"] for line in evidence.ended)
        calls = sum(len(line["calls"]) for line in evidence.ended)
        samples = sum(line["event"] == "begin" for line in evidence.oracle)
        print(f"claims {claims}, calls that count {calls}, of several versions {evidence.moved}")
        print(f"samples begun {samples}, faults {len(faults)}")

    def never_hit(self) -> list[str]:
        """Cells of the table that are empty."""
        return [f"{kind}: {state}" for kind in self.kinds for state in STATES if not self.table[kind][state]]


def hostilities(run_dir: Path) -> str:
    """What each hostile client did, as a table."""
    done = read_lines(run_dir / HOSTILE)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in done:
        counts[line["who"]][line["event"]] += 1
    rows = [f"{who:14} " + ", ".join(f"{event} {n}" for event, n in counts[who].items()) for who in WAYS]
    statuses = Counter(line["status"] for line in done if line["event"] == "attack")
    return "\n".join([*rows, f"attacks answered with {dict(statuses)}"])


def _is(owner: str, worker: str) -> bool:
    """Whether an owner of claims is this worker."""
    return owner.rpartition("/")[2] == worker


def _worker_token(number: int) -> str:
    """The environment variable of a worker's own token."""
    return f"TOKEN_OF_WORKER_{number}"
