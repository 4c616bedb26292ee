"""`textarena:GAME` is a game of TextArena, alone or against a role of the run."""

# Types are checked without TextArena.
# pyright: reportMissingImports=false

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import textarena

from tinkerscript.errors import ConfigError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import HELD_OUT_SEED, EpisodeModel, Task, TaskSample, named_scores


class TextArenaGame(Task):
    """Each sample is a seed and the policy's seat."""

    def __init__(
        self,
        game: str,
        /,
        *,
        size: int = 500,
        held_out_size: int = 100,
        seed: int = 0,
        players: int | None = None,
        opponent: str = "",
        system_prompt: str = "",
    ) -> None:
        """`opponent` is the role of the other seats; then `players` defaults to 2 instead of 1.

        Raises ConfigError for a game that is unknown, cannot start with so many players, or needs a download.
        """
        self._game = game
        self._opponent = opponent
        self._players = players or (2 if opponent else 1)
        if self._players > 1 and not opponent:
            raise ConfigError(
                f"textarena:{game}: {self._players} players need an opponent: give the name of a role"
            )
        self._sizes = (size, held_out_size)
        self._seed = seed
        self._system = system_prompt
        try:
            self._started(seed)
        except Exception as error:  # Unknown ids, player counts, missing word lists.
            raise ConfigError(
                f"textarena:{game} cannot start with {self._players} players: {_first_line(error)}"
            ) from error

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        first = self._seed + HELD_OUT_SEED * held_out
        return [
            {
                "id": seed,
                "input": f"{self._game}, seed {seed}, seat {seed % self._players}",
                "seed": seed,
                "seat": seed % self._players,
            }
            for seed in range(first, first + self._sizes[held_out])
        ]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        seed, seat = int(str(sample["seed"])), int(str(sample["seat"]))
        game = self._started(seed)
        others = model.role(self._opponent)
        seats = [
            _Player(model if number == seat else others, self._system) for number in range(self._players)
        ]
        over = False
        while not over:
            number, observation = game.get_observation()
            over, _ = game.step(action=await seats[number].move(str(observation)))
        rewards, info = game.close()
        return _output(float((rewards or {}).get(seat, 0.0)), info.get(seat, {}), seats[seat].moves)

    def _started(self, seed: int) -> Any:
        # No await: games draw from the process's global random numbers.
        random.seed(seed)
        game = textarena.make(env_id=self._game)
        game.reset(num_players=self._players, seed=seed)
        return game


@dataclass
class _Player:
    model: EpisodeModel
    system_prompt: str
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seen: str = ""
    moves: int = 0

    async def move(self, observation: str) -> str:
        if not self.messages and self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})
        new = observation.removeprefix(self.seen).strip() or observation
        self.seen = observation
        self.messages.append({"role": "user", "content": new})
        said = await self.model.ask(self.messages)
        self.messages.append({"role": "assistant", "content": said})
        self.moves += 1
        return said


def _output(reward: float, info: Mapping[str, Any], moves: int) -> WorkflowOutput:
    metrics = {"moves": float(moves), "invalid_move": float(bool(info.get("invalid_move")))}
    return named_scores(
        reward, {"game": reward}, metrics=metrics, metadata={"reason": str(info.get("reason", ""))}
    )


def _first_line(error: Exception) -> str:
    # NLTK's errors are boxes of many lines.
    lines = [line.strip(" *") for line in str(error).splitlines()]
    return f"{type(error).__name__}: {next((line for line in lines if line), '')}"
