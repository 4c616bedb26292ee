"""An OpenEnv environment in a server of its own: count down from a number that the seed gives, one or two at
a time.

python countdown_server.py prints its port.
"""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Take(Action):
    count: int


class Left(Observation):
    left: int = 0


class Countdown(Environment):
    """Each number taken is worth 0.1, and reaching 0 exactly 1; below 0 costs 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Left:
        self._left = start(seed or 0)
        return Left(left=self._left)

    def step(self, action: Take, timeout_s: float | None = None, **kwargs: Any) -> Left:
        self._left -= action.count
        reward = 0.1 * action.count + (1.0 if self._left == 0 else -1.0 if self._left < 0 else 0.0)
        return Left(left=self._left, reward=reward, done=self._left <= 0)

    @property
    def state(self) -> State:
        return State()


def start(seed: int) -> int:
    return random.Random(seed).randint(3, 6)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Countdown, Take, Left, max_concurrent_envs=8)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
