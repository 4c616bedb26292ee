"""TinkerScript: reinforcement learning for agents whose rollouts are ordinary programs.

Import what you need from the rooms: `tinkerscript.client` on a rollout machine,
`tinkerscript.train` beside the weights. This module imports nothing heavy.
"""

from importlib.metadata import version

__version__ = version("tinkerscript")

__all__ = ["__version__"]
