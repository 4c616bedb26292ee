"""Ray clusters of several nodes on this machine, and what a test has started that is still there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

MARK = "TEST_OF_TINKERSCRIPT"
"""An environment variable of everything that a test starts, which names its folder."""

OBJECT_STORE_BYTES = 80 * 2**20

FINDS_THE_DEAD = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
"""A node that is gone is noticed in 3 s; one that is merely slow has as long as ever to answer."""


class VirtualCluster:
    """Nodes on this machine, each with a raylet of its own; the first one is the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=False)
        self._nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """Where Ray writes its own."""
        return Path(self._nodes[0].get_logs_dir_path())

    def add(self, cpus: float, gpus: int = 0) -> Any:
        """`gpus`: what the node says that it has."""
        options: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        if not self._nodes:
            options["_system_config"] = FINDS_THE_DEAD
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


def left_of(folder: Path, text: str, *, within_s: float) -> list[str]:
    """The command lines, with `text` in them, of what a test started and what has not ended `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := _found(folder, text)) and (remaining_s := deadline - time.monotonic()) > 0:
        psutil.wait_procs(list(left), timeout=remaining_s)
    return list(left.values())


def _found(folder: Path, text: str) -> dict[psutil.Process, str]:
    found: dict[psutil.Process, str] = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and text in command and process.environ().get(MARK) == str(folder):
                found[process] = command
        except psutil.Error:
            continue  # It ended during the look, or is another user's.
    return found
