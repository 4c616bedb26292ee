"""Samplers over the user's inference servers."""

from tinkerscript.gateway.samplers.remote import RemoteSampler, remote_sampler

__all__ = ["RemoteSampler", "remote_sampler"]
