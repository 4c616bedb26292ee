"""`open_frozen_role`: a `frozen` role of the config as a model that samples and scores."""

from __future__ import annotations

from tinkerscript.config import RoleConfig
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend

__all__ = ["open_frozen_role"]


async def open_frozen_role(name: str, role: RoleConfig, backend: TrainerBackend) -> FrozenModel:
    """The model of the role `name`, beside the one that `backend` trains, which closes it.

    Raises ConfigError, with the role's name, for a model that is not there or cannot be used.
    """
    try:
        return await backend.open_frozen(role.model)
    except (ConfigError, EngineError) as error:
        raise ConfigError(f"roles.{name}.model: {role.model!r}: {error}") from error
