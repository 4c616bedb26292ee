"""How many modules an episode passes, in a real run: `python dev/house.py --trace` lists them."""

from __future__ import annotations

import pytest

from command_line import ROOT
from episode_trace import EpisodeTrace, trace_episode

MOST_MODULES = 101
"""That an episode passes, in all processes together: among them three that record it for the page, two that
bring its transcript there, one that watches clients, two for servers that replace each other, three between
a worker and its task, of whatever kind, one for each of the policies that a step trains, the table of bounds,
the health of the run, the temperature of each token, images, experts, and the products of matrices."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("house"), pytest.mark.long]


@pytest.fixture(scope="module")
def trace() -> EpisodeTrace:
    return trace_episode(ROOT)


def test_the_trace_shows_what_each_process_does_between_claim_and_publication(trace: EpisodeTrace) -> None:
    assert list(trace.stops) == ["worker", "server", "trainer"]
    rooms = {process: {name.split(".")[1] for name in names} for process, names in trace.stops.items()}
    assert "client" in rooms["worker"]
    assert {"server", "gateway"} <= rooms["server"]
    assert {"train", "engine", "rollouts"} <= rooms["trainer"]
    # What runs at the start of each process, or only when modules are imported, is no stop.
    assert not {"tinkerscript", "tinkerscript.cli", "tinkerscript.config"} & trace.union
    assert all(at >= 0 for stops in trace.stops.values() for at in stops.values())
    assert f"passes {len(trace.union)} modules" in trace.as_text()


def test_an_episode_passes_few_modules(trace: EpisodeTrace) -> None:
    assert len(trace.union) <= MOST_MODULES, trace.as_text()
