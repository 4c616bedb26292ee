"""`FleetPoll`: asks a run's server who works on its episodes, for the table in the terminal.

Invariant: it only looks on. A server that does not answer is asked again, and the run knows nothing of it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable

import httpx
import pydantic

from tinkerscript.dashboard.run_table import WorkersNow
from tinkerscript.protocol import FleetClient, FleetResponse
from tinkerscript.server.auth import ADMIN_TOKEN, read_token

POLL_EVERY_S = 2.0
TIMEOUT_S = 2.0
NAMED = 4
"""Clients that are named, those with the most claims first."""


LOCAL_WORKER = re.compile(r"worker-[0-9a-f]{8}-(\d+)-\d+")
"""The name that the trainer gives to a worker of its own: its number, and how often it was started before."""


class FleetPoll:
    """A thread that asks, from `start` to `stop`."""

    def __init__(self, told: Callable[[WorkersNow | None], None]) -> None:
        """`told` is called with each answer, and with None where there is none."""
        self._told = told
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        """Ask the server at `url` from now on."""
        self._thread = threading.Thread(target=self._run, args=(url,), name="fleet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, url: str) -> None:
        token = read_token(os.environ, ADMIN_TOKEN)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # The certificate names the server's public address, and this is the same machine.
        with httpx.Client(timeout=TIMEOUT_S, headers=headers, verify=False, trust_env=False) as client:
            while not self._stopping.wait(POLL_EVERY_S):
                self._told(_workers(client, url))


def _uuid(client: FleetClient) -> str:
    return client.client_uuid


def _name(client_uuid: str) -> str:
    """Of a worker that a run started, its number."""
    found = LOCAL_WORKER.fullmatch(client_uuid)
    return f"worker {found[1]}" if found else client_uuid


def _workers(client: httpx.Client, url: str) -> WorkersNow | None:
    try:
        reply = client.get(f"{url}/fleet")
        reply.raise_for_status()
        fleet = FleetResponse.model_validate_json(reply.content)
    except (httpx.HTTPError, pydantic.ValidationError):
        return None
    holding = [each for each in fleet.clients if each.claims]
    return WorkersNow(
        claims={_name(each.client_uuid): each.claims for each in sorted(holding[:NAMED], key=_uuid)},
        clients=fleet.totals.clients,
        claimed=fleet.totals.claims,
        waiting=sum(counts.registered for counts in fleet.episodes.values()),
        idle=fleet.waiting_clients,
        quarantined=fleet.totals.quarantined,
    )
