"""Claim episodes, call the model, and hand in rewards: the part that a rollout machine installs.

`tinkerjet_remote` is a client for the server named in the environment, which is read at first use.
"""

from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.episode import Episode
from tinkerscript.client.runner import Runner, RunStatistics, run
from tinkerscript.client.sync_client import TinkerScriptClient
from tinkerscript.protocol import WorkflowOutput

__all__ = [
    "AsyncTinkerScriptClient",
    "Episode",
    "RunStatistics",
    "Runner",
    "TinkerScriptClient",
    "WorkflowOutput",
    "run",
    "tinkerjet_remote",
]

tinkerjet_remote = TinkerScriptClient.from_env()
