"""The model endpoint that rollout programs call, and the record of every token it sampled."""

from tinkerscript.gateway.gateway import Gateway, create_gateway

__all__ = ["Gateway", "create_gateway"]
