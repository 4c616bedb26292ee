"""The keys of a link that leaves this machine: CURVE, one pair for the server and one for the trainer.

Invariant: secret keys are in files that only their owner reads, and a pair is made once and whole: of two
processes that start at once, one makes the folder and the other reads it. Format: ZeroMQ certificates.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from tinkerscript.errors import ConfigError

KEYS_DIR = "link_keys"
"""In the run folder."""

SERVER = "server"
TRAINER = "trainer"

_REMEDY = f"copy the folder {KEYS_DIR!r} of the server's run folder, or delete it there to make a new one"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the server's end holds. Keys are in Z85, 40 characters."""

    public: bytes
    secret: bytes = field(repr=False)
    trainer_public: bytes
    """The one key that may connect."""


@dataclass(frozen=True, slots=True)
class TrainerKeys:
    """What the trainer's end holds. Keys are in Z85, 40 characters."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes
    """The one server that is trusted."""


def make_link_keys(folder: Path) -> None:
    """Make both pairs in `folder`, unless it exists. Raises ConfigError if it cannot be written."""
    if folder.exists():
        return
    try:
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))  # 0700
        try:
            for name in (SERVER, TRAINER):
                for path in zmq.auth.create_certificates(draft, name):
                    Path(path).chmod(0o600)
            if not folder.exists():
                draft.rename(folder)
        except OSError:
            if not folder.exists():  # Else the other process was first.
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot make the link's keys in {folder}: {error}") from error


def load_server_keys(folder: Path) -> ServerKeys:
    """The server's keys. Raises ConfigError that names the file and the remedy."""
    public, secret = _pair(folder, SERVER)
    return ServerKeys(public, secret, _public(folder, TRAINER))


def load_trainer_keys(folder: Path) -> TrainerKeys:
    """The trainer's keys; of the folder `server.key` and the two `trainer` files are enough.

    Raises ConfigError that names the file and the remedy.
    """
    public, secret = _pair(folder, TRAINER)
    return TrainerKeys(public, secret, _public(folder, SERVER))


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _read(path)
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{path} must be owned by this user and readable by nobody else (chmod 600)")
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; {_REMEDY}")
    return public, secret


def _public(folder: Path, name: str) -> bytes:
    return _read(folder / f"{name}.key")[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None:
                zmq.curve_public(key)  # Raises for what is no key.
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{path} holds no key of a link ({error}); {_REMEDY}") from error
    return public, secret
