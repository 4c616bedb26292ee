"""Samplers over inference servers of the user's: vLLM and SGLang."""

from tinkerscript.gateway.samplers.remote import FOREIGN_POLICY, RemoteSampler, remote_sampler

__all__ = ["FOREIGN_POLICY", "RemoteSampler", "remote_sampler"]
