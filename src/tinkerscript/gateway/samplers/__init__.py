"""Samplers over the user's inference servers: vLLM and SGLang."""

from tinkerscript.gateway.samplers.remote import FOREIGN_POLICY, RemoteSampler, remote_sampler

__all__ = ["FOREIGN_POLICY", "RemoteSampler", "remote_sampler"]
