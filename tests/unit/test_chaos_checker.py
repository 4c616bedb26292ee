"""The chaos run's checker sees every kind of fault that it is there for."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from checker import ID_HEX, Evidence, find_faults, reward_of
from evidence import LedgerLines

TURNS = 3


def sound() -> Evidence:
    """Two episodes of three calls each, in a step that was undone and made again; the second has one more
    call, of a reply that got lost. A third is a hostile client's, a fourth was cancelled."""
    oracle: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    confirmed: list[dict[str, Any]] = []
    for episode in ("e0", "e1"):
        calls, nonces, prompt, parent = [], [], "", None
        for turn in range(TURNS):
            for again in range(2 if (episode, turn) == ("e1", 1) else 1):
                nonce = f"{episode}{turn}{again}".replace("e", "e0") + "abcdef"
                call = _sample(oracle, nonce, episode, prompt=f"{prompt}0{turn}")
                calls.append(call | {"parent": parent, "new_prompt": f"0{turn}", "version": 1})
            nonces.append(nonce)
            prompt, parent = f"{prompt}0{turn}{call['sampled']}", call["call"]
        told = {"episode": episode, "attempt": 2, "client": "w", "reward": reward_of(nonces)}
        confirmed.append(told | {"nonces": nonces})
        ended.append(_episode(**told, metadata={"nonces": nonces}, calls=calls))
    lost = _sample(oracle, "05e0abcdef", "e0", prompt="00") | {"parent": None, "new_prompt": "00"}
    ended += [
        # A hostile client's own: a wrong result of its own claim, and of a copy of its own episode.
        _episode(episode="e2", attempt=3, client="thief/t", reward=1e6),
        _episode(episode="mine#2", client="thief/t", reward=-1.0, pool="thief", step=0),
    ]
    cancelled = _episode(episode="e3", state="failed", failures=["abandoned", "cancelled"])
    episodes = [*ended, cancelled]
    used = ["e0", "e1", "e2"]
    step = {"step": 1, "episodes": used}
    trained = [
        {"episode": name, "step": 1, "role": "", "outcome": "trained", "undone": undone}
        for name in used
        for undone in (0, 2)
    ]
    return Evidence(
        steps=1,
        per_step=3,
        turns=TURNS,
        ledger=LedgerLines(
            episodes=episodes,
            trained=[*trained, _left_out("e3"), _left_out("mine#2")],
            steps=[{"step": 1, "undone": 2}, {"step": 1, "undone": 0}],
            publications=[{"policy_version": version} for version in range(4)],
            other_claims=[{"episode": "e0", "attempt": 1, "client": "w", "calls": [lost]}],
        ),
        trainer=[
            {"event": "resumed", "resumption": 1, "step": 0},
            {"event": "plans", "step": 1, "episodes": [*used, "e3"]},
            {"event": "registered", "step": 1, "episodes": [*used, "e3"]},
            *(_received(episode, number) for number, episode in enumerate(ended, 1)),
            {"event": "cancels", "episodes": ["e3"]},
            {"event": "committed", **step},
            {"event": "resumed", "resumption": 2, "step": 0},
            *(_received(episode, number) for number, episode in enumerate(ended[:3], 1)),
            _received(cancelled, 5),
            {"event": "committed", **step},
        ],
        oracle=oracle,
        confirmed=confirmed,
        hostile=[
            {"who": "thief", "event": "claimed", "episode": "e2", "attempt": 3, "client": "thief/t"},
            {"who": "thief", "event": "handed in", "episode": "e2", "attempt": 3, "reward": 1e6},
            {"who": "thief", "event": "registered", "episode": "mine"},
            {"who": "thief", "event": "claimed", "episode": "mine#2", "attempt": 2, "client": "thief/t"},
            {"who": "thief", "event": "handed in", "episode": "mine#2", "attempt": 2, "reward": -1.0},
            _attack(),
            {"who": "thief", "event": "error", "path": "/v1", "status": 503, "reason": "no trainer"},
        ],
    )


def _sample(oracle: list[dict[str, Any]], nonce: str, episode: str, *, prompt: str) -> dict[str, Any]:
    """What the sampler wrote down, and the call that was made of it."""
    sampled = nonce.encode().hex()
    oracle.append({"event": "begin", "sample": nonce, "worker": "w", "episode": episode, "turn": 0})
    end = {"event": "end", "sample": nonce, "nonce": nonce, "prompt": prompt}
    oracle.append(end | {"sampled": sampled, "logprobs": "aa"})
    return {"call": f"call-{nonce}", "sampled": sampled, "logprobs": "aa"}


def _episode(**changed: Any) -> dict[str, Any]:
    line = {"pool": "", "step": 1, "state": "ended", "consumed": True, "undone": 0, "failures": []}
    return line | {"attempt": 2, "claimed_version": 1, "metadata": {}, "calls": []} | changed


def _left_out(name: str) -> dict[str, Any]:
    return {"episode": name, "step": 0, "role": "", "outcome": "left_out", "undone": 0}


def _received(episode: dict[str, Any], number: int) -> dict[str, Any]:
    same = {key: episode.get(key) for key in ("episode", "attempt", "client", "reward", "metadata")}
    calls = [call["call"] for call in episode["calls"]]
    return same | {"event": "received", "kind": episode["state"], "number": number, "calls": calls}


def _attack(**changed: Any) -> dict[str, Any]:
    line = {"who": "thief", "event": "attack", "what": "guessed key", "path": "/end_episode"}
    return line | {"status": 401, "accepted": False, "reason": "no claim has this key"} | changed


def test_a_sound_run_has_no_faults() -> None:
    assert find_faults(sound()) == []


Spoil = Callable[[Any], Any]


def _with(**changed: Spoil) -> Spoil:
    """Some fields of the evidence, made anew."""
    return lambda run: replace(run, **{name: change(run) for name, change in changed.items()})


def _ledger(**changed: Spoil) -> Spoil:
    """Some tables of the ledger, made anew."""
    return _with(ledger=lambda run: _with(**changed)(run.ledger))


def _spoiled(find: Callable[[Any], dict[str, Any]], **changed: Any) -> Spoil:
    """Some values of a dictionary in the evidence."""

    def spoil(run: Any) -> Any:
        find(run).update(changed)
        return run

    return spoil


def _changed(table: str, line: int, **changed: Any) -> Spoil:
    """Some columns of a row of the ledger."""
    return _spoiled(lambda run: getattr(run.ledger, table)[line], **changed)


def _told(line: int, **changed: Any) -> Spoil:
    """Some values of a line of the trainer's log."""
    return _spoiled(lambda run: run.trainer[line], **changed)


def _call(line: int, number: int, **changed: Any) -> Spoil:
    return _spoiled(lambda run: run.ledger.episodes[line]["calls"][number], **changed)


def _call_of_another(run: Any) -> Any:
    """The thief's call, under the claim of an honest client, which has no idea."""
    drawn = {"sampled": "feed", "logprobs": "aa"}
    call = {"call": "t", "parent": None, "new_prompt": "00", "version": 1} | drawn
    run.ledger.episodes[0]["calls"].append(call)
    begin = {"event": "begin", "sample": "t", "worker": "thief/t", "episode": "e2", "turn": 0}
    end = {"event": "end", "sample": "t", "nonce": "t", "prompt": "00"} | drawn
    return replace(run, oracle=[*run.oracle, begin, end])


def _other_episodes_calls(run: Any) -> Any:
    first, second = run.ledger.episodes[:2]
    first["calls"], second["calls"] = second["calls"], first["calls"]
    return run


def _missing_turn(run: Any) -> Any:
    nonces = run.ledger.episodes[0]["metadata"]["nonces"][:2]
    run.ledger.episodes[0] |= {"metadata": {"nonces": nonces}, "reward": reward_of(nonces)}
    return run


def _call_twice(run: Any) -> Any:
    calls = run.ledger.episodes[0]["calls"]
    calls.append(calls[2] | {"call": "other"})
    return run


def _spoil_hostile(**changed: Any) -> Spoil:
    return _with(hostile=lambda run: [*run.hostile, _attack(**changed)])


_hostile_reward = _with(
    hostile=lambda run: [run.hostile[0], run.hostile[1] | {"reward": 1.0}, *run.hostile[2:]]
)
_confirmed_another = _with(confirmed=lambda run: [run.confirmed[0] | {"attempt": 1}, *run.confirmed[1:]])
_unplanned = _with(trainer=lambda run: [*run.trainer[:1], *run.trainer[3:]])
_came_again = _with(trainer=lambda run: [*run.trainer[:14], run.trainer[10], *run.trainer[14:]])
_came_after_its_step = _with(trainer=lambda run: [*run.trainer, *_again(run, step=1)])
_missing = _ledger(episodes=lambda ledger: ledger.episodes[1:], trained=lambda ledger: ledger.trained[2:])
_commit_lost = _ledger(trained=lambda ledger: ledger.trained[2:])
_trained_twice = _ledger(trained=lambda ledger: [*ledger.trained, ledger.trained[0] | {"step": 2}])


def _again(run: Any, *, step: int) -> list[dict[str, Any]]:
    """A trainer that resumes after `step` and gets an outcome that the step had used."""
    return [{"event": "resumed", "resumption": 3, "step": step}, run.trainer[3]]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        # Lost
        (_missing, "e0: registered, and not in the ledger"),
        (_missing, "e0: confirmed to w and not in the ledger"),
        (_changed("episodes", 1, state="claimed"), "e1: claimed in the ledger, not over"),
        (_commit_lost, "e0: ended, and nothing has used it"),
        (_commit_lost, "e0: committed for step 1 by the trainer's log, for None by the ledger"),
        (_commit_lost, "step 1: trained on 2 episodes, not 3"),
        (_ledger(steps=lambda ledger: ledger.steps[:1]), "step 1: 0 in the ledger that stand"),
        (_changed("episodes", 1, state="failed", failures=["expired"]), "e1: failed: ['expired']"),
        (_with(trainer=lambda run: [*run.trainer[:7], *run.trainer[8:]]), "e3: cancelled, and nobody asked"),
        (_confirmed_another, "but the ledger has claim 2"),
        # Doubled
        (_trained_twice, "e0: 2 rows of training that stand"),
        (_ledger(steps=lambda ledger: 2 * ledger.steps), "step 1: 2 in the ledger that stand"),
        (_came_again, "e0: reached the trainer twice"),
        (_came_after_its_step, "e0: reached the trainer again, after step 1 had trained on it"),
        (_told(11, number=1), "number 1 came after 1"),
        (_told(9, resumption=1), "resumption 1 comes after 1"),
        (_with(confirmed=lambda run: [*run.confirmed, run.confirmed[0]]), "confirmed 2 times"),
        (_call_twice, "one sample is in 2 calls"),
        # Crossed
        (_call_of_another, "has a call that thief/t made for e2"),
        (_changed("other_claims", 0, episode="e1"), "e1: claim 1 of w has a call that w made for e0"),
        (_other_episodes_calls, "nonce of turn 0 is in 0 calls"),
        (_told(3, reward=7.0), "e0: reached the trainer otherwise than it is in the ledger"),
        (_told(3, calls=[]), "e0: reached the trainer otherwise than it is in the ledger"),
        (_changed("episodes", 0, step=2), "e0: step 1 trained on it, and it was not planned so"),
        (_changed("episodes", 0, undone=2), "e0: step 1 trained on it, and it was not planned so"),
        (_unplanned, "e0: an episode that nobody registered"),
        (_changed("episodes", 0, reward=1.0), "is not that of its nonces"),
        (_with(oracle=lambda run: [run.oracle[0], *run.oracle[2:]]), "not in the oracle's log"),
        (_call(0, 1, new_prompt="ff"), "another prompt"),
        (_call(0, 1, logprobs="bb"), "other logprobs"),
        (_call(1, 3, parent="another"), "does not extend"),
        (_missing_turn, "2 nonces, not 3"),
        # Policy versions
        (_call(0, 2, version=0), "e0: call call-e0020abcdef has policy version 0"),
        (_changed("episodes", 0, claimed_version=2), "has policy version 1"),
        (_changed("publications", 2, policy_version=0), "published in the order [0, 1, 0, 3]"),
        # Hostile clients
        (_with(hostile=lambda run: run.hostile[1:]), "which never had claim 3"),
        (_hostile_reward, "is not what its owner handed in"),
        (_changed("episodes", 3, pool="worker-1"), "mine#2: an episode that nobody registered"),
        (_with(trainer=lambda run: [*run.trainer, {"event": "stopped"}]), "somebody has stopped the trainer"),
        (_spoil_hostile(event="worker", code=2, executed=["file"]), "executed what its task does not"),
        (_spoil_hostile(event="knock", let_in=False, status=503), "others are kept out: /health said 503"),
        (_spoil_hostile(event="knock", let_in=True, seconds=11.0), "/health took 11.0 s"),
        (_spoil_hostile(event="head", sent=2**21, whole=True), "took all 2097152 bytes of a head"),
        (_spoil_hostile(accepted=True), "guessed key: /end_episode let it pass"),
        (_spoil_hostile(reason=""), "says 401 without a reason"),
        (_spoil_hostile(event="error", status=500), "failed with 500"),
        (_spoil_hostile(event="unanswered", body="{"), "did not answer"),
    ],
)
def test_each_fault_is_seen(spoil: Spoil, said: str) -> None:
    faults = find_faults(spoil(copy.deepcopy(sound())))
    assert any(said in fault for fault in faults), faults


def streamed() -> Evidence:
    """The same, over versions that move in flight: the first call is of two of them."""
    run = copy.deepcopy(sound())
    parts = [
        {"event": "part", "version": 1, **{key: line[key] for key in ("prompt", "logprobs")}}
        | {"sampled": line["sampled"][: 2 * ID_HEX]}
        for line in run.oracle
        if line["event"] == "end"
    ]
    whole = parts[0]
    first = whole | {"version": 0, "sampled": whole["sampled"][:ID_HEX]}
    left = whole["sampled"][ID_HEX:]
    rest = {"prompt": whole["prompt"] + first["sampled"], "sampled": left, "logprobs": ""}
    for line in (*run.ledger.episodes, *run.ledger.other_claims):
        for call in line.get("calls", ()):
            call |= {"spans": []} | ({} if "version" in call else {"version": 1})
    run.ledger.episodes[0]["calls"][0] |= {"version": 0, "spans": [[0, 0], [1, 1]]}
    run.ledger.episodes[0]["claimed_version"] = 0
    published = [{"policy_version": version, "step": version - 1, "undone": 0} for version in range(4)]
    return replace(
        run,
        max_policy_lag=1,
        oracle=[*run.oracle, first, whole | rest, *parts[1:]],
        ledger=replace(run.ledger, publications=published),
    )


def test_a_sound_run_whose_weights_moved_in_flight_has_no_faults() -> None:
    assert find_faults(streamed()) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_call(0, 0, spans=[[0, 0]]), "e0: version 0 has not sampled the tokens 0 to 2 of call"),
        (_call(0, 0, spans=[[0, 0], [2, 1]]), "e0: version 2 has not sampled the tokens 1 to 2 of call"),
        (_with(oracle=lambda run: run.oracle[:-1]), "version 1 has not sampled the tokens 0 to 2"),
        (_changed("publications", 0, step=-2), "e0: step 1 trained on tokens of version 0"),
        (_changed("publications", 1, undone=2), "e1: step 1 trained on tokens of version 1"),
        (_changed("episodes", 0, step=-1), "e0: step 1 trained on it, and it was not planned so"),
    ],
)
def test_each_fault_of_weights_in_flight_is_seen(spoil: Spoil, said: str) -> None:
    faults = find_faults(spoil(streamed()))
    assert any(said in fault for fault in faults), faults
