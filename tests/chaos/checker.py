"""Whether a chaos run lost, doubled or mixed up anything: a pure function over its ledger and the logs that
its processes left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence import LedgerLines

Line = Mapping[str, Any]

ID_HEX = 8
"""Characters of an id, or of a log probability."""


@dataclass(frozen=True)
class Evidence:
    """What the processes of one run wrote."""

    steps: int
    per_step: int
    """Episodes that train in each step."""

    turns: int
    ledger: LedgerLines
    trainer: Sequence[Line] = ()
    """The trainer's own log."""

    oracle: Sequence[Line] = ()
    """The sampler's own log."""

    confirmed: Sequence[Line] = ()
    """Results that the server confirmed to a worker."""

    max_policy_lag: int | None = None
    """Of what a step trains on; None: each step trains on the groups that were planned for it."""

    hostile: Sequence[Line] = ()
    """What the hostile clients did, and how they were answered."""

    @property
    def ended(self) -> list[Line]:
        """The results in the ledger."""
        return [line for line in self.ledger.episodes if line["state"] == "ended"]

    @property
    def moved(self) -> int:
        """Calls of results that several versions of the weights sampled."""
        return sum(len(call["spans"]) > 1 for line in self.ended for call in line["calls"])


def find_faults(evidence: Evidence) -> list[str]:
    """Everything that is wrong; empty for a run in which nothing was lost, doubled or mixed up."""
    ended = evidence.ended
    samples = {line["nonce"]: line for line in evidence.oracle if line["event"] == "end"}
    faults = [*_all_over(evidence), *_trained_once(evidence), *_received(evidence), *_confirmed(evidence)]
    faults += ["somebody has stopped the trainer" for line in evidence.trainer if line["event"] == "stopped"]
    theirs, claims = claims_of(evidence.hostile), [*ended, *evidence.ledger.other_claims]
    for line in ended:
        if _claim(line) not in theirs:
            faults += _joined(line, evidence.turns, samples)
    if evidence.max_policy_lag is not None:
        faults += [*_spans(evidence.oracle, claims), *_too_old(evidence, evidence.max_policy_lag)]
    return [
        *(*faults, *_no_call_twice(claims), *_crossed(evidence, claims), *_versions(evidence, ended)),
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


def _all_over(evidence: Evidence) -> Iterable[str]:
    """Whatever was registered has ended, and was used or left out; only what the trainer cancelled failed."""
    named: dict[str, set[str]] = defaultdict(set)
    for line in evidence.trainer:
        if line["event"] in ("plans", "registered", "cancels"):
            named[line["event"]].update(line["episodes"])
    found = {line["episode"] for line in evidence.ledger.episodes}
    for name in sorted(named["registered"] - found):
        yield f"{name}: registered, and not in the ledger"
    outcomes = {line["episode"]: line["outcome"] for line in evidence.ledger.trained}
    theirs = {(line["who"], line["episode"]) for line in evidence.hostile if line["event"] == "registered"}
    for line in evidence.ledger.episodes:
        name = line["episode"]
        if line["pool"]:
            # A copy is named after its original.
            if (line["pool"], name.partition("#")[0]) not in theirs:
                yield f"{name}: an episode that nobody registered"
            continue
        if name not in named["plans"]:
            yield f"{name}: an episode that nobody registered"
        if line["state"] not in ("ended", "failed"):
            yield f"{name}: {line['state']} in the ledger, not over"
        elif not line["consumed"] or name not in outcomes:
            yield f"{name}: {line['state']}, and nothing has used it or left it out"
        if line["state"] == "failed" and line["failures"][-1:] != ["cancelled"]:
            yield f"{name}: failed: {line['failures']}"
        elif line["state"] == "failed" and not (name in named["cancels"] or outcomes.get(name) == "given_up"):
            yield f"{name}: cancelled, and nobody asked for that"


def _trained_once(evidence: Evidence) -> Iterable[str]:
    """Each step that stands trained on whole groups of its own; nothing has two outcomes that stand."""
    steps = Counter(line["step"] for line in evidence.ledger.steps if not line["undone"])
    for step in range(1, evidence.steps + 1):
        if steps[step] != 1:
            yield f"step {step}: {steps[step]} in the ledger that stand, not 1"
    episodes = {line["episode"]: line for line in evidence.ledger.episodes}
    standing = [line for line in evidence.ledger.trained if not line["undone"]]
    for (name, role), times in Counter((line["episode"], line["role"]) for line in standing).items():
        if times > 1:
            yield f"{name}: {times} rows of training that stand for role {role!r}, not 1"
    trained, most = dict[str, int](), evidence.max_policy_lag or 0
    for line in standing:
        episode = episodes[line["episode"]]
        if line["outcome"] == "trained":
            trained[line["episode"]] = line["step"]
            late = line["step"] - episode["step"]
            if episode["state"] != "ended" or not 0 <= late <= most or episode["undone"]:
                yield f"{line['episode']}: step {line['step']} trained on it, and it was not planned so"
    for step, number in Counter(trained.values()).items():
        if number != evidence.per_step:
            yield f"step {step}: trained on {number} episodes, not {evidence.per_step}"
    committed = _committed(evidence.trainer)
    for name in sorted(trained.keys() | committed.keys()):
        if trained.get(name) != committed.get(name):
            yield (
                f"{name}: committed for step {committed.get(name)} by the trainer's log, for "
                f"{trained.get(name)} by the ledger"
            )


def _committed(trainer: Sequence[Line]) -> dict[str, int]:
    """What the trainer was told is committed, and no resumption undid: episode -> step."""
    standing: dict[str, int] = {}
    for line in trainer:
        if line["event"] == "resumed":
            standing = {name: step for name, step in standing.items() if step <= line["step"]}
        elif line["event"] == "committed":
            standing |= dict.fromkeys(line["episodes"], line["step"])
    return standing


def _received(evidence: Evidence) -> Iterable[str]:
    """Each outcome reaches a process of the trainer once, in order, as the ledger has it; and none again
    after a step that stands has used it."""
    episodes = {line["episode"]: line for line in evidence.ledger.episodes}
    seen, used, last, resumption = set[str](), dict[str, int](), 0, 0
    for place, line in enumerate(evidence.trainer):
        if line["event"] == "resumed":
            seen, last = set(), 0
            used = _committed(evidence.trainer[: place + 1])
            if line["resumption"] <= resumption:
                yield f"resumption {line['resumption']} comes after {resumption}"
            resumption = line["resumption"]
        elif line["event"] == "received":
            name = line["episode"]
            if name in seen:
                yield f"{name}: reached the trainer twice"
            if name in used:
                yield f"{name}: reached the trainer again, after step {used[name]} had trained on it"
            if line["number"] <= last:
                yield f"{name}: number {line['number']} came after {last}"
            seen.add(name)
            last = line["number"]
            if (ledger := _outcome_of(episodes.get(name))) != {key: line.get(key) for key in ledger}:
                yield f"{name}: reached the trainer otherwise than it is in the ledger"


def _outcome_of(episode: Line | None) -> dict[str, Any]:
    """What the trainer gets of an outcome."""
    if episode is None or episode["state"] != "ended":
        return {"kind": None if episode is None else episode["state"]}
    calls = [call["call"] for call in episode["calls"]]
    same = {key: episode[key] for key in ("attempt", "client", "reward", "metadata")}
    return same | {"kind": "ended", "calls": calls}


def _confirmed(evidence: Evidence) -> Iterable[str]:
    """A result that a worker was told is stored must be the one in the ledger."""
    ended = {line["episode"]: line for line in evidence.ended}
    for told in evidence.confirmed:
        name, line = told["episode"], ended.get(told["episode"])
        if line is None:
            yield f"{name}: confirmed to {told['client']} and not in the ledger"
        elif any(line[key] != told[key] for key in ("attempt", "client", "reward")):
            yield (
                f"{name}: confirmed to {told['client']} claim {told['attempt']}, but the ledger has claim "
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


def _spans(oracle: Sequence[Line], claims: Sequence[Line]) -> Iterable[str]:
    """Each span of a call is what the version that it names has sampled, after exactly the ids before it."""
    parts: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in oracle:
        if line["event"] == "part" and line["sampled"]:
            parts[line["version"], line["prompt"]].append(line)
    for line in claims:
        prompts = dict[str | None, str]({None: ""})
        for call in line["calls"]:
            prompt = prompts.get(call["parent"], "") + call["new_prompt"]
            prompts[call["call"]] = prompt + call["sampled"]
            spans = call["spans"] or [[call["version"], 0]]
            ends = [*(first for _, first in spans[1:]), len(call["sampled"]) // ID_HEX]
            for (version, first), end in zip(spans, ends, strict=True):
                before, own = call["sampled"][: first * ID_HEX], slice(first * ID_HEX, end * ID_HEX)
                wanted = call["sampled"][own], call["logprobs"][own]
                known = parts[version, prompt + before]
                if not any((part["sampled"], part["logprobs"]) == wanted for part in known):
                    yield (
                        f"{line['episode']}: version {version} has not sampled the tokens {first} to {end} "
                        f"of call {call['call']}"
                    )


def _too_old(evidence: Evidence, most: int) -> Iterable[str]:
    """No step trains on a token of weights more than so many steps before it, or of some that are undone."""
    published = evidence.ledger.publications
    steps = {line["policy_version"]: line["step"] for line in published if not line["undone"]}
    episodes = {line["episode"]: line for line in evidence.ended}
    for line in evidence.ledger.trained:
        if line["outcome"] != "trained" or line["undone"]:
            continue
        for call in episodes[line["episode"]]["calls"]:
            for version in {call["version"], *(version for version, _ in call["spans"])}:
                lag = line["step"] - 1 - steps.get(version, -1)
                if version not in steps or not 0 <= lag <= most:
                    yield f"{line['episode']}: step {line['step']} trained on tokens of version {version}"


def _crossed(evidence: Evidence, claims: Sequence[Line]) -> Iterable[str]:
    """Every recorded call was made by the owner of its claim, for its episode."""
    marks = {line["sample"]: line for line in evidence.oracle if line["event"] == "begin"}
    samples = {line["sampled"]: line["sample"] for line in evidence.oracle if line["event"] == "end"}
    for line in claims:
        for call in line["calls"]:
            mark = marks.get(samples.get(call["sampled"], ""))
            if mark is None:
                yield f"{line['episode']}: nobody asked the sampler for call {call['call']}"
            elif (mark["worker"], mark["episode"]) != (line["client"], line["episode"]):
                yield (
                    f"{line['episode']}: claim {line['attempt']} of {line['client']} has a call that "
                    f"{mark['worker']} made for {mark['episode']}"
                )


def _versions(evidence: Evidence, ended: Sequence[Line]) -> Iterable[str]:
    """Policy versions increase: as they are published, and from a claim to its calls, one after the other."""
    published = [line["policy_version"] for line in evidence.ledger.publications]
    if published != list(range(len(published))):
        yield f"policy versions were published in the order {published}"
    for line in ended:
        before: dict[str | None, int] = {None: line["claimed_version"]}
        for call in line["calls"]:
            if not before.get(call["parent"], 0) <= call["version"] < len(published):
                yield f"{line['episode']}: call {call['call']} has policy version {call['version']}"
            before[call["call"]] = max(call["version"], *(version for version, _ in call.get("spans", ())), 0)


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
    """The number that a worker makes of its nonces, which tells them from any others."""
    return float(int("".join(nonces), 16) % 1_000_003)


def _no_call_twice(claims: Sequence[Line]) -> Iterable[str]:
    where: dict[str, list[str]] = defaultdict(list)
    for line in claims:
        for call in line["calls"]:
            where[call["sampled"]].append(line["episode"])
    for episodes in where.values():
        if len(episodes) > 1:
            yield f"one sample is in {len(episodes)} calls: {episodes}"
