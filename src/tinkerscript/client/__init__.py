"""What a rollout machine installs: claim episodes, call the model, hand in rewards.

`tinkerjet_remote` is the client of the server that the environment names, which is read at first use.
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
