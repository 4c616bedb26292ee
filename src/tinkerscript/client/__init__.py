"""What a rollout machine installs: claim episodes, call the model, hand in rewards."""

from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.episode import Episode
from tinkerscript.client.remote import tinkerjet_remote
from tinkerscript.client.runner import Runner, RunStatistics, run
from tinkerscript.client.sync_client import TinkerScriptClient

__all__ = [
    "AsyncTinkerScriptClient",
    "Episode",
    "RunStatistics",
    "Runner",
    "TinkerScriptClient",
    "run",
    "tinkerjet_remote",
]
