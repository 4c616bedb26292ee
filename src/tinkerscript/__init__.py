"""TinkerScript: reinforcement learning for agents that are ordinary programs.

Import `tinkerscript.client` on a rollout machine, `tinkerscript.train` next to the weights.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # Reading the version is slow.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("tinkerscript")
