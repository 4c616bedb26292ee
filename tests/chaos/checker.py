"""Whether a chaos run lost, doubled or mixed up anything: a pure function over the files that it left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What the processes of one run wrote."""

    episodes: Sequence[str]
    """Uuids of the episodes that had to end."""

    turns: int
    journal: Sequence[Line] = ()
    """The trainer's outcomes."""

    oracle: Sequence[Line] = ()
    """The sampler's own log."""

    confirmed: Sequence[Line] = ()
    """Results that the server confirmed to a worker."""

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    """Episode -> its state in the server's file, at the end."""


def find_faults(evidence: Evidence) -> list[str]:
    """Everything that is wrong; empty for a run in which nothing was lost."""
    ended = [line for line in evidence.journal if line["event"] == "ended"]
    samples = {line["nonce"]: line for line in evidence.oracle if line["event"] == "end"}
    faults = [*_once_each(evidence), *_states(evidence), *_confirmed(evidence, ended)]
    for line in ended:
        faults += _joined(line, evidence.turns, samples)
    return [*faults, *_no_call_twice(ended)]


def _once_each(evidence: Evidence) -> Iterable[str]:
    outcomes = Counter(line["episode"] for line in evidence.journal if line["event"] in ("ended", "failed"))
    for name in evidence.episodes:
        if outcomes[name] != 1:
            yield f"{name}: {outcomes[name]} outcomes in the trainer's journal, not 1"
    for name in outcomes.keys() - set(evidence.episodes):
        yield f"{name}: an outcome of an episode that nobody registered"
    for line in evidence.journal:
        if line["event"] == "failed":
            yield f"{line['episode']}: failed: {line['failures']}"


def _states(evidence: Evidence) -> Iterable[str]:
    for name in evidence.episodes:
        state = evidence.states.get(name, "missing")
        if state != "accepted":
            yield f"{name}: {state} in the server's file, not accepted"


def _confirmed(evidence: Evidence, ended: Sequence[Line]) -> Iterable[str]:
    """A result that a worker was told is stored must be the one in the journal."""
    journal = {line["episode"]: line for line in ended}
    for told in evidence.confirmed:
        name, line = told["episode"], journal.get(told["episode"])
        if line is None:
            yield f"{name}: confirmed to {told['client']} and not in the journal"
        elif any(line[key] != told[key] for key in ("attempt", "client", "reward")):
            yield (
                f"{name}: confirmed to {told['client']} claim {told['attempt']}, but the journal has claim "
                f"{line['attempt']} of {line['client']}"
            )
    told_twice = Counter(told["episode"] for told in evidence.confirmed)
    for name, times in told_twice.items():
        if times > 1:
            yield f"{name}: confirmed {times} times"


def _joined(line: Line, turns: int, samples: Mapping[str, Line]) -> Iterable[str]:
    """The result's nonces are those of a chain of calls of this claim, as the oracle sampled them."""
    name, nonces = line["episode"], line["metadata"]["nonces"]
    if line["reward"] != reward_of(nonces):
        yield f"{name}: the reward {line['reward']} is not that of its nonces"
    if len(nonces) != turns:
        yield f"{name}: {len(nonces)} nonces, not {turns}"
    by_sampled = {sample["sampled"]: sample for sample in samples.values()}
    calls, prompts = {call["call"]: call for call in line["calls"]}, dict[str, str]()
    for call in line["calls"]:
        before = calls.get(call["parent"])
        prefix = prompts.get(call["parent"], "") + (before["sampled"] if before else "")
        prompts[call["call"]] = prefix + call["new_prompt"]
        sample = by_sampled.get(call["sampled"])
        if sample is None:
            yield f"{name}: call {call['call']} is not in the oracle's log"
        elif sample["prompt"] != prompts[call["call"]] or sample["logprobs"] != call["logprobs"]:
            yield f"{name}: call {call['call']} has another prompt or other logprobs than the oracle's"
    parent = None
    for turn, nonce in enumerate(nonces):
        sampled = samples[nonce]["sampled"] if nonce in samples else None
        found = [call for call in line["calls"] if call["sampled"] == sampled]
        if len(found) != 1:
            yield f"{name}: the nonce of turn {turn} is in {len(found)} calls of its claim, not 1"
            return
        if found[0]["parent"] != parent:
            yield f"{name}: the call of turn {turn} does not extend the one of the turn before"
        parent = found[0]["call"]


def reward_of(nonces: Sequence[str]) -> float:
    """The number that a worker makes of its nonces."""
    return float(int("".join(nonces), 16) % 1_000_003)


def _no_call_twice(ended: Sequence[Line]) -> Iterable[str]:
    where: dict[str, list[str]] = defaultdict(list)
    for line in ended:
        for call in line["calls"]:
            where[call["sampled"]].append(line["episode"])
    for episodes in where.values():
        if len(episodes) > 1:
            yield f"one sample is in {len(episodes)} calls: {episodes}"
