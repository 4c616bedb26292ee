"""Games of TextArena, alone and against a model at another address: the rewards are the package's own."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import textarena
from claims import run_all

from outside_chat import Message, outside_chat, scripted_chat
from tinkerscript.errors import ConfigError
from tinkerscript.workers.base_task import load_task

ALONE = "GuessTheNumber-v0"
AGAINST = "TicTacToe-v0"


def halving(messages: list[Message]) -> str:
    """Guesses by halving, from the hints that it has heard."""
    low, high = 1, 20
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        number = int(re.findall(r"\d+", guess["content"])[-1])
        if "higher" in hint["content"]:
            low = number + 1
        else:
            high = number - 1
    return f"[{(low + high) // 2}]"


def first_free(messages: list[Message]) -> str:
    return re.findall(r"'(\[\d\])'", messages[-1]["content"])[0]


def last_free(messages: list[Message]) -> str:
    return re.findall(r"'(\[\d\])'", messages[-1]["content"])[-1]


def own_game(game: str, seed: int, seats: list[Any]) -> dict[int, float]:
    """The game as TextArena's own loop plays it."""
    random.seed(seed)
    env = textarena.make(env_id=game)
    env.reset(num_players=len(seats), seed=seed)
    talks: list[list[Message]] = [[] for _ in seats]
    seen = [""] * len(seats)
    over = False
    while not over:
        number, observation = env.get_observation()
        new, seen[number] = observation.removeprefix(seen[number]), observation
        talks[number].append({"role": "user", "content": new.strip() or observation})
        move = seats[number](talks[number])
        talks[number].append({"role": "assistant", "content": move})
        over, _ = env.step(action=move)
    return env.close()[0]


async def test_a_game_alone_is_scored_as_the_package_scores_it() -> None:
    task = load_task(f"textarena:{ALONE}", {"size": 5})
    expected = [own_game(ALONE, seed, [halving])[0] for seed in range(5)]
    async with scripted_chat(halving) as server:
        ours = await run_all(task, server.url)
    assert [output.reward for output in ours] == expected
    assert max(expected) == 1.0
    assert {output.log_metrics["moves"] for output in ours} != {1.0}


async def test_a_game_against_a_role_is_scored_for_the_policys_seat() -> None:
    def move(request: dict[str, Any]) -> str:
        return (last_free if request["model"] == "rival" else first_free)(request["messages"])

    expected = [
        own_game(AGAINST, seed, [first_free, last_free] if seed % 2 == 0 else [last_free, first_free])
        for seed in range(4)
    ]
    async with outside_chat(move) as server:
        task = load_task(f"textarena:{AGAINST}", {"size": 4, "opponent": "rival"})
        ours = await run_all(task, server.url)
    assert [sample["seat"] for sample in task.samples(held_out=False)] == [0, 1, 0, 1]
    assert [output.reward for output in ours] == [game[seed % 2] for seed, game in enumerate(expected)]
    assert {request["model"] for request in server.requests} == {"policy", "rival"}
    assert {key for key, _ in server.asked} == {f"key-{n}" for n in range(4)}


def test_held_out_games_are_others() -> None:
    task = load_task(f"textarena:{ALONE}", {})
    train, held_out = ({sample["id"] for sample in task.samples(held_out=each)} for each in (False, True))
    assert (len(train), len(held_out), train & held_out) == (500, 100, set())


@pytest.mark.parametrize(
    ("game", "args", "said"),
    [
        ("TicTacToe-v0", {"players": 2}, "2 players need an opponent"),
        ("TicTacToe-v0", {}, "cannot start with 1 players"),
        ("NoSuchGame-v0", {}, "cannot start with 1 players.*NoSuchGame"),
    ],
)
def test_a_game_that_cannot_be_played_says_why(game: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)textarena:{game}:? ?.*{said}"):
        load_task(f"textarena:{game}", args)
