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
from checker import Evidence, find_faults, reward_of

TURNS = 3


def sound() -> Evidence:
    """Two episodes of three calls each; the second has one more, of a reply that got lost."""
    oracle: list[dict[str, Any]] = []
    journal: list[dict[str, Any]] = []
    confirmed: list[dict[str, Any]] = []
    for episode in ("e0", "e1"):
        calls, nonces, prompt, parent = [], [], "", None
        for turn in range(TURNS):
            for again in range(2 if (episode, turn) == ("e1", 1) else 1):
                nonce = f"{episode}{turn}{again}".replace("e", "e0") + "abcdef"
                sampled = nonce.encode().hex()
                oracle.append(
                    {"event": "begin", "sample": nonce, "worker": "w", "episode": episode, "turn": turn}
                )
                oracle.append(
                    {
                        "event": "end",
                        "sample": nonce,
                        "nonce": nonce,
                        "prompt": f"{prompt}0{turn}",
                        "sampled": sampled,
                        "logprobs": "aa",
                    }
                )
                call = f"call-{nonce}"
                calls.append(
                    {
                        "call": call,
                        "parent": parent,
                        "new_prompt": f"0{turn}",
                        "sampled": sampled,
                        "logprobs": "aa",
                    }
                )
            nonces.append(nonce)
            prompt, parent = f"{prompt}0{turn}{sampled}", call
        told = {"episode": episode, "attempt": 1, "client": "w", "reward": reward_of(nonces)}
        confirmed.append(told | {"nonces": nonces})
        line = told | {"event": "ended", "pool": "", "metadata": {"nonces": nonces}, "calls": calls}
        journal.append(line)
    journal += [
        # A hostile client's own: a wrong result of its own claim, and of a copy of its own episode.
        {"event": "ended", "episode": "e2", "attempt": 3, "client": "thief/t", "reward": 1e6, "pool": ""}
        | {"metadata": {}, "calls": []},
        {"event": "ended", "episode": "mine#2", "attempt": 1, "client": "thief/t", "reward": -1.0}
        | {"pool": "thief", "metadata": {}, "calls": []},
        {"event": "failed", "episode": "mine", "pool": "thief", "failures": []},
    ]
    return Evidence(
        episodes=["e0", "e1", "e2"],
        turns=TURNS,
        journal=journal,
        oracle=oracle,
        confirmed=confirmed,
        hostile=[
            {"who": "thief", "event": "claimed", "episode": "e2", "attempt": 3, "client": "thief/t"},
            {"who": "thief", "event": "handed in", "episode": "e2", "attempt": 3, "reward": 1e6},
            {"who": "thief", "event": "registered", "episode": "mine"},
            {"who": "thief", "event": "claimed", "episode": "mine#2", "attempt": 1, "client": "thief/t"},
            {"who": "thief", "event": "handed in", "episode": "mine#2", "attempt": 1, "reward": -1.0},
            _attack(),
            {"who": "thief", "event": "error", "path": "/v1", "status": 503, "reason": "no trainer"},
        ],
        states={"e0": "accepted", "e1": "accepted", "e2": "accepted"},
    )


def _attack(**changed: Any) -> dict[str, Any]:
    line = {"who": "thief", "event": "attack", "what": "guessed key", "path": "/end_episode"}
    return line | {"status": 401, "accepted": False, "reason": "no claim has this key"} | changed


def test_a_sound_run_has_no_faults() -> None:
    assert find_faults(sound()) == []


Spoil = Callable[[Any], Any]


def _without(**changed: Spoil) -> Spoil:
    """Some fields of the evidence, made anew."""
    return lambda run: replace(run, **{name: change(run) for name, change in changed.items()})


def _journal(line: int, **changed: Spoil) -> Spoil:
    """Some values of a line of the journal, made anew from the lines."""

    def spoil(run: Any) -> Any:
        run.journal[line] |= {name: change(run.journal) for name, change in changed.items()}
        return run

    return spoil


def _call(line: int, number: int, **changed: Any) -> Spoil:
    def spoil(run: Any) -> Any:
        run.journal[line]["calls"][number] |= changed
        return run

    return spoil


def _call_of_another(run: Any) -> Any:
    """The thief's call, under the claim of an honest client, which has no idea."""
    call = {"call": "t", "parent": None, "new_prompt": "00", "sampled": "feed", "logprobs": "aa"}
    run.journal[0]["calls"].append(call)
    begin = {"event": "begin", "sample": "t", "worker": "thief/t", "episode": "e2", "turn": 0}
    end = {"event": "end", "sample": "t", "nonce": "t", "prompt": "00", "sampled": "feed", "logprobs": "aa"}
    return replace(run, oracle=[*run.oracle, begin, end])


def _other_claims_calls(run: Any) -> Any:
    run.journal[0]["calls"], run.journal[1]["calls"] = run.journal[1]["calls"], run.journal[0]["calls"]
    return run


def _missing_turn(run: Any) -> Any:
    nonces = run.journal[0]["metadata"]["nonces"][:2]
    run.journal[0] |= {"metadata": {"nonces": nonces}, "reward": reward_of(nonces)}
    return run


def _spoil_hostile(**changed: Any) -> Spoil:
    return _without(hostile=lambda run: [*run.hostile, _attack(**changed)])


_FAILED = {"event": "failed", "episode": "e1", "pool": "", "failures": []}
_hostile_reward = _without(
    hostile=lambda run: [run.hostile[0], run.hostile[1] | {"reward": 1.0}, *run.hostile[2:]]
)
_confirmed_another = _without(confirmed=lambda run: [run.confirmed[0] | {"attempt": 2}, *run.confirmed[1:]])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_call_of_another, "has a call that thief/t made for e2"),
        (_without(hostile=lambda run: run.hostile[1:]), "which never had claim 3"),
        (_hostile_reward, "is not what its owner handed in"),
        (_journal(3, pool=lambda _: "worker-1"), "mine#2: an outcome of an episode that nobody registered"),
        (_without(journal=lambda run: [*run.journal, run.journal[3]]), "mine#2: 2 outcomes"),
        (
            _without(journal=lambda run: [*run.journal, {"event": "stopped"}]),
            "somebody has stopped the trainer",
        ),
        (_spoil_hostile(event="worker", code=2, executed=["file"]), "executed what its task does not"),
        (_spoil_hostile(event="knock", let_in=False, status=503), "others are kept out: /health said 503"),
        (_spoil_hostile(event="knock", let_in=True, seconds=11.0), "/health took 11.0 s"),
        (_spoil_hostile(event="head", sent=2**21, whole=True), "took all 2097152 bytes of a head"),
        (_spoil_hostile(accepted=True), "guessed key: /end_episode let it pass"),
        (_spoil_hostile(reason=""), "says 401 without a reason"),
        (_spoil_hostile(event="error", status=500), "failed with 500"),
        (_spoil_hostile(event="unanswered", body="{"), "did not answer"),
        (_without(journal=lambda run: run.journal[:1]), "e1: 0 outcomes"),
        (_without(journal=lambda run: [*run.journal, run.journal[0]]), "e0: 2 outcomes"),
        (_without(journal=lambda run: [run.journal[0], _FAILED]), "e1: failed"),
        (_without(episodes=lambda _: ["e0", "e2"]), "nobody registered"),
        (_other_claims_calls, "nonce of turn 0 is in 0 calls"),
        (_journal(0, reward=lambda lines: lines[0]["reward"] + 1), "is not that of its nonces"),
        (_without(oracle=lambda run: [run.oracle[0], *run.oracle[2:]]), "not in the oracle's log"),
        (_call(0, 1, new_prompt="ff"), "another prompt"),
        (_call(0, 1, logprobs="bb"), "other logprobs"),
        (_call(1, 3, parent="another"), "does not extend"),
        (
            _journal(0, calls=lambda lines: [*lines[0]["calls"], lines[0]["calls"][2] | {"call": "other"}]),
            "one sample is in 2 calls",
        ),
        (_missing_turn, "2 nonces, not 3"),
        (_without(states=lambda _: {"e0": "accepted", "e1": "claimed"}), "e1: claimed in the server's file"),
        (_without(states=lambda _: {"e0": "accepted"}), "e1: missing"),
        (_confirmed_another, "but the journal has claim 1"),
        (_without(confirmed=lambda run: [*run.confirmed, run.confirmed[0]]), "confirmed 2 times"),
    ],
)
def test_each_fault_is_seen(spoil: Spoil, said: str) -> None:
    faults = find_faults(spoil(copy.deepcopy(sound())))
    assert any(said in fault for fault in faults), faults
