"""Ray clusters of several nodes on this machine. `make cluster` installs what these tests need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import end_all

MARK = "TEST_OF_TINKERSCRIPT"
"""An environment variable of everything that a test starts, which names its folder."""

OBJECT_STORE_BYTES = 80 * 2**20


class VirtualCluster:
    """Nodes on this machine, each with a raylet of its own; the first one is the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=False)
        self._nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: float, gpus: int = 0) -> Any:
        """`gpus`: what the node says that it has."""
        options = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        node = self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, **options)
        self._nodes.append(node)
        return node

    def remove(self, node: Any) -> None:
        """The node is gone, without a word."""
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.remove(node)

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture
def cluster(nothing_is_left_running: Path) -> Iterator[VirtualCluster]:
    found = VirtualCluster()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(MARK, str(tmp_path))
    yield tmp_path
    end_all()
    assert not left_of(tmp_path, "tinkerscript", within_s=60)


def left_of(folder: Path, text: str, *, within_s: float) -> list[str]:
    """The command lines, with `text` in them, of what a test started and what has not ended `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := _commands(folder, text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _commands(folder: Path, text: str) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and text in command and process.environ().get(MARK) == str(folder):
                found.append(command)
        except psutil.Error:
            continue  # It ended during the look, or is another user's.
    return found
