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

    hostile: Sequence[Line] = ()
    """What the hostile clients did, and how they were answered."""

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    """Episode -> its state in the server's file, at the end."""


def find_faults(evidence: Evidence) -> list[str]:
    """Everything that is wrong; empty for a run in which nothing was lost."""
    ended = [line for line in evidence.journal if line["event"] == "ended"]
    samples = {line["nonce"]: line for line in evidence.oracle if line["event"] == "end"}
    faults = [*_once_each(evidence), *_states(evidence), *_confirmed(evidence, ended)]
    faults += ["somebody has stopped the trainer" for line in evidence.journal if line["event"] == "stopped"]
    theirs = claims_of(evidence.hostile)
    for line in ended:
        if _claim(line) not in theirs:
            faults += _joined(line, evidence.turns, samples)
    return [
        *(*faults, *_no_call_twice(ended), *_crossed(evidence, ended)),
        *find_hostile_faults(evidence.hostile, ended),
    ]


def find_hostile_faults(hostile: Sequence[Line], ended: Sequence[Line]) -> list[str]:
    """What hostile clients did and should not have been able to do; `ended`: all results."""
    return [*_not_theirs(hostile, ended), *_let_in(hostile), *_harm_done(hostile)]


def claims_of(hostile: Sequence[Line]) -> set[tuple[str, int]]:
    """Episode and attempt of each claim of hostile clients."""
    return {_claim(line) for line in hostile if line["event"] == "claimed"}


def _claim(line: Line) -> tuple[str, int]:
    return line["episode"], line["attempt"]


def _once_each(evidence: Evidence) -> Iterable[str]:
    outcomes = Counter(line["episode"] for line in evidence.journal if line["event"] in ("ended", "failed"))
    for name in evidence.episodes:
        if outcomes[name] != 1:
            yield f"{name}: {outcomes[name]} outcomes in the trainer's journal, not 1"
    own = {(line["who"], line["episode"]) for line in evidence.hostile if line["event"] == "registered"}
    others = {line["episode"]: line for line in evidence.journal if "pool" in line}
    for name in outcomes.keys() - set(evidence.episodes):
        # A copy is named after its original.
        if (others[name]["pool"], name.partition("#")[0]) not in own:
            yield f"{name}: an outcome of an episode that nobody registered"
        elif outcomes[name] != 1:
            yield f"{name}: {outcomes[name]} outcomes in the trainer's journal, not 1"
    for line in evidence.journal:
        if line["event"] == "failed" and not line["pool"]:
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
    name, nonces = line["episode"], line["metadata"].get("nonces", [])
    if not nonces or line["reward"] != reward_of(nonces):
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


def _crossed(evidence: Evidence, ended: Sequence[Line]) -> Iterable[str]:
    """Every recorded call was made by the owner of its claim, for its episode."""
    marks = {line["sample"]: line for line in evidence.oracle if line["event"] == "begin"}
    samples = {line["sampled"]: line["sample"] for line in evidence.oracle if line["event"] == "end"}
    for line in ended:
        for call in line["calls"]:
            mark = marks.get(samples.get(call["sampled"], ""))
            if mark is None:
                yield f"{line['episode']}: nobody asked the sampler for call {call['call']}"
            elif (mark["worker"], mark["episode"]) != (line["client"], line["episode"]):
                yield (
                    f"{line['episode']}: claim {line['attempt']} of {line['client']} has a call that "
                    f"{mark['worker']} made for {mark['episode']}"
                )


def _not_theirs(hostile: Sequence[Line], ended: Sequence[Line]) -> Iterable[str]:
    """Their results are those that they handed in for claims of their own, and no others."""
    theirs, names = claims_of(hostile), {line["who"] for line in hostile}
    handed_in = {(*_claim(line), line["reward"]) for line in hostile if line["event"] == "handed in"}
    for line in ended:
        if _claim(line) in theirs and (*_claim(line), line["reward"]) not in handed_in:
            yield f"{line['episode']}: the result of claim {line['attempt']} is not what its owner handed in"
        elif _claim(line) not in theirs and line["client"].partition("/")[0] in names:
            yield f"{line['episode']}: a result of {line['client']}, which never had claim {line['attempt']}"


def _let_in(hostile: Sequence[Line]) -> Iterable[str]:
    """Every attack is refused with its reason, and breaks nothing."""
    for line in hostile:
        if line["event"] == "attack" and line["accepted"]:
            yield f"{line['who']}: {line['what']}: {line['path']} let it pass"
        elif line["event"] == "attack" and not line["reason"]:
            yield f"{line['who']}: {line['what']}: {line['path']} says {line['status']} without a reason"
        elif line["event"] == "error" and line["status"] != 503:
            yield f"{line['who']}: {line['path']} failed with {line['status']}: {line['reason']}"
        elif line["event"] == "unanswered":
            yield f"{line['who']}: {line['path']} did not answer {line['body']!r}"


PATIENCE_S = 10.0
"""A server that is busy and not kept from its work answers `/health` within so long."""


def _harm_done(hostile: Sequence[Line]) -> Iterable[str]:
    """What they tried to make others do did not happen, and others were let in meanwhile."""
    for line in hostile:
        if line["event"] == "worker" and line["executed"]:
            yield f"{line['who']}: a worker executed what its task does not contain: {line['executed']}"
        elif line["event"] == "knock" and not line["let_in"]:
            yield f"{line['who']}: others are kept out: /health said {line['status']}"
        elif line["event"] == "knock" and line["seconds"] > PATIENCE_S:
            yield f"{line['who']}: others wait: /health took {line['seconds']} s"
        elif line["event"] == "head" and line["whole"]:
            yield f"{line['who']}: the server took all {line['sent']} bytes of a head"


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
