"""Games of verifiers: each player has its reward, and one that is not the policy's is a role of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from claims import run_all
from own_packages import own_evaluation, stand_in_for_uv

from outside_chat import outside_chat
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import load_task
from tinkerscript.workers.environments import verifiers_environment

GAME = '''
import verifiers.v1 as vf

class HandConfig(vf.EnvConfig):
    player0: vf.AgentConfig = vf.AgentConfig()
    player1: vf.AgentConfig = vf.AgentConfig()

class HandEnv(vf.Env[HandConfig]):
    """The higher number wins what the other loses; a word ends the hand."""
    async def run(self, task, agents):
        traces = []
        for player in (agents.player0, agents.player1):
            seat = vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"{task.data.prompt} A number, please."))
            traces.append(await player.run(seat))
        first, second = (int(trace.last_reply) for trace in traces)
        won = float((first > second) - (first < second))
        for trace, payoff in zip(traces, (won, -won)):
            trace.record_reward("payoff", payoff)

class HandTask(vf.Task[vf.TaskData]):
    pass

class HandTaskset(vf.Taskset[HandTask, vf.TasksetConfig]):
    def load(self):
        return [HandTask(vf.TaskData(idx=0, prompt="A hand."), self.config.task)]

__all__ = ["HandTaskset", "HandEnv"]
'''
LOCAL = {"harness": {"id": verifiers_environment.HARNESS_ID}, "runtime": {"type": "subprocess"}}
"""verifiers' own evaluation, its chat program in this process: `test_verifiers` compares the two."""

PLAYERS: dict[str, dict[str, Any]] = {"player0": {}, "player1": {"model": "rival"}}


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "hand_v1.py").write_text(GAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv("PATH", stand_in_for_uv(folder / "bin"))
        yield


async def both_ways(
    players: dict[str, dict[str, Any]], numbers: dict[str, str]
) -> tuple[WorkflowOutput, Any]:
    """Our result of a hand, and verifiers' own episode; each model says its number."""
    async with outside_chat(lambda body: numbers[body["model"]]) as server:
        task = load_task("verifiers:hand-v1", players)
        local = {name: {**LOCAL, **player} for name, player in players.items()}
        (theirs,) = await own_evaluation("hand-v1", server.url, **local)
        (ours,) = await run_all(task, server.url)
    return ours, theirs


@pytest.mark.parametrize(("said", "won"), [("9", 1.0), ("2", -1.0)])
async def test_a_player_with_another_model_is_a_role_with_its_own_reward(said: str, won: float) -> None:
    ours, theirs = await both_ways(PLAYERS, {"policy": said, "rival": "5"})
    assert [trace.reward for trace in theirs.traces] == [won, -won]
    assert ours.reward == won, "the policy's own, not the mean of all players"
    scores = {"player0/payoff": won, "player1/payoff": -won, "rival": -won}
    assert ours.metadata["scores"] == scores
    assert ours.log_metrics["score/rival"] == -won, "what a role of this name trains on"


async def test_players_that_are_all_the_policys_share_a_reward() -> None:
    ours, theirs = await both_ways({"player0": {}, "player1": {}}, {"policy": "5"})
    assert ours.reward == sum(trace.reward for trace in theirs.traces) == 0.0


async def test_a_reply_that_the_environment_cannot_use_counts_as_in_verifiers_evaluation() -> None:
    ours, theirs = await both_ways(PLAYERS, {"policy": "nine", "rival": "5"})
    assert not theirs.ok
    assert [trace.reward for trace in theirs.traces if not trace.errors] == [0.0, 0.0]
    assert ours.reward == 0.0
    assert ours.log_metrics["environment_error"] == 1.0
    assert "nine" in str(ours.metadata["environment_error"])
