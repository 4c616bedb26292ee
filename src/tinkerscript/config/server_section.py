from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from tinkerscript.config.section import Section
from tinkerscript.errors import MAX_REWARD

DEFAULT_PORT = 10086

# "auto" means DEFAULT_PORT, or any free port if that one is in use.
Port = Annotated[int, Field(ge=0, le=65535)] | Literal["auto"]


class ClientConfig(Section):
    name: str = Field(min_length=1, max_length=100, pattern="^[^/]+$")
    """Unique name in errors and metrics."""

    token_env: str = Field(min_length=1)
    """Environment variable with the client's token, or with `_FILE` appended, with a file's path."""

    max_claims: int = Field(default=256, ge=1)
    """Maximum claims at once."""


class InterchangeConfig(Section):
    interchange_method: Literal["ipc", "tcp"] = "ipc"
    """Link between trainer and server: `ipc` on one machine, `tcp` between two."""

    interchange_server_host: str = "127.0.0.1"
    """Address that the HTTP server binds. Both tokens are required if it is not loopback, with
    `trusted_proxies`, or with another host in `public_base_url`."""

    interchange_server_port: Port = "auto"
    """HTTP port. 0: a free one. `auto`: 10086, or if in use and without `public_base_url` a free one.
    `server.json` in the run folder has the URL."""

    link_host: str = "127.0.0.1"
    """IP address that the `tcp` link binds. It is encrypted: the trainer needs the run folder's
    `link_keys`."""

    link_port: int = Field(default=0, ge=0, le=65535)
    """Port of the `tcp` link. 0: a free port."""

    public_base_url: str = ""
    """URL for clients, if not of host and port, as behind a proxy."""

    trusted_proxies: list[str] = Field(default_factory=list[str])
    """Addresses of proxies that may set `X-Forwarded-Proto` and `X-Forwarded-For`."""

    tls_certificate: str = ""
    """PEM file with the certificate and its chain, to serve HTTPS."""

    tls_key: str = ""
    """PEM file with the private key. Empty: it is in `tls_certificate`."""

    clients: list[ClientConfig] = Field(default_factory=list[ClientConfig])
    """Clients with their own tokens and limits. Others share a token."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Failed attempts after which an episode fails."""

    call_timeout_s: float = Field(default=300.0, gt=0)
    """Maximum seconds for a model call."""

    max_claim_s: float = Field(default=7200.0, gt=0)
    """Maximum seconds of a claim, renewals included."""

    processes: int = Field(default=1, ge=1, le=64)
    """Processes that answer model calls. Above 1, each has a port and a share of the claims, and the server
    only manages episodes (docs/cluster.md)."""

    store: str = "sqlite"
    """The run's ledger: `sqlite` (in the run folder), `sqlite:///PATH`, or `postgresql://USER@HOST/DATABASE`
    (docs/failover.md)."""

    durability: Literal["normal", "full"] = "normal"
    """`normal`: a commit survives a killed process. `full`: also a power failure, for one disk sync per
    commit (PostgreSQL needs `fsync`)."""

    max_reward: float = Field(default=MAX_REWARD, gt=0, le=MAX_REWARD)
    """Rewards of a larger magnitude are refused. With untrusted clients, set the scorer's maximum: one huge
    reward decides a step's direction."""

    max_tokens_per_claim: int = Field(default=4_000_000, ge=1)
    """Maximum tokens that a claim may sample."""

    model_names: list[str] = Field(default_factory=list[str])
    """Model names that requests may use besides `policy` and the model's own. Empty: any."""

    @model_validator(mode="after")
    def _each_client_once(self) -> InterchangeConfig:
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError(f"each of `clients` needs a name of its own, got {names}")
        if self.tls_key and not self.tls_certificate:
            raise ValueError("tls_key needs a tls_certificate")
        return self
