"""Thousands of episodes while workers, server and trainer are killed, and network and clients misbehave.

Groups start beside the steps, with a `max_policy_lag` of 4, and weights move in flight. CHAOS_SEED,
CHAOS_EPISODES, CHAOS_WORKERS, CHAOS_KILLS and CHAOS_LAG change the size; the defaults are `make chaos`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checker import find_faults
from conductor import Conductor, Plan, hostilities
from evidence import read_lines
from hostile import WAYS


def number(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@pytest.mark.timeout(1700)
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan(
        seed=number("CHAOS_SEED", 1),
        episodes=number("CHAOS_EPISODES", 2000),
        workers=number("CHAOS_WORKERS", 20),
        kills_of_each_kind=number("CHAOS_KILLS", 24),
        max_policy_lag=number("CHAOS_LAG", 4),
    )
    conductor = Conductor(plan, tmp_path)
    evidence = conductor.run()
    faults = find_faults(evidence)
    network = read_lines(tmp_path / "proxy.jsonl")[-1]
    with capfd.disabled():
        print(
            f"\nseed {plan.seed}: {plan.episodes} episodes, {plan.workers} workers, {conductor.seconds:.0f} s"
        )
        print(conductor.report())
        print("the network: " + ", ".join(f"{what} {times}" for what, times in sorted(network.items())))
        claims = sum(line["attempt"] for line in evidence.ended)
        calls = sum(len(line["calls"]) for line in evidence.ended)
        samples = sum(line["event"] == "begin" for line in evidence.oracle)
        print(hostilities(tmp_path))
        print(f"calls of several versions {evidence.moved}")
        print(f"claims {claims}, calls that count {calls}, samples begun {samples}, faults {len(faults)}")
    assert not faults, "\n".join(faults[:20])
    attacks = {
        line["who"] for line in evidence.hostile if line["event"] in ("attack", "claimed", "socket", "head")
    }
    assert attacks == set(WAYS)
    assert "knock" in {line["event"] for line in evidence.hostile}
    codes = {line["code"] for line in evidence.hostile if line["event"] == "worker"}
    assert codes == {2}, "a worker refuses the samples, and says so by its exit code"
    assert evidence.moved
    if os.environ.get("CHAOS_ALL_STATES") != "no":  # A short run may miss one.
        assert not conductor.never_hit()
