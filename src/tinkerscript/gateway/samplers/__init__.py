"""Samplers over inference servers of the user's: vLLM and SGLang."""

from tinkerscript.gateway.samplers.opening import remote_sampler
from tinkerscript.gateway.samplers.remote import FOREIGN_POLICY, RemoteSampler

__all__ = ["FOREIGN_POLICY", "RemoteSampler", "remote_sampler"]
