"""The settings of the interchange server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from tinkerscript.config.section import Section
from tinkerscript.errors import MAX_REWARD

DEFAULT_PORT = 10086
"""Where a server listens if it can."""

Port = Annotated[int, Field(ge=0, le=65535)] | Literal["auto"]
"""`auto`: `DEFAULT_PORT`, or where that is in use a free one."""


class ClientConfig(Section):
    name: str = Field(min_length=1, max_length=100, pattern="^[^/]+$")
    """Name of the client in refusals and metrics, and of its own pool."""

    token_env: str = Field(min_length=1)
    """Name of the environment variable that holds the client's token. The same with `_FILE` appended may
    name a file that holds it."""

    max_claims: int = Field(default=256, ge=1)
    """Maximum number of claims that it may hold at once."""


class InterchangeConfig(Section):
    interchange_method: Literal["ipc", "tcp"] = "ipc"
    """Transport of the ZeroMQ link between trainer and server."""

    interchange_server_host: str = "127.0.0.1"
    """Address that the HTTP server binds. Any address other than loopback needs both tokens, and so does a
    server behind `trusted_proxies` or with another machine's name in `public_base_url`."""

    interchange_server_port: Port = "auto"
    """HTTP port. `auto`: 10086, or where that is in use and `public_base_url` is not set, a free port. 0: a
    free port. The run folder's `server.json` has the URL."""

    link_host: str = "127.0.0.1"
    """IP address that the link binds if `interchange_method` is `tcp`. Such a link is encrypted: the trainer
    needs the run folder's `link_keys`."""

    link_port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the link if `interchange_method` is `tcp`. 0 picks a free port."""

    public_base_url: str = ""
    """URL at which clients reach the server, if it differs from host and port (for example behind a
    proxy)."""

    trusted_proxies: list[str] = Field(default_factory=list[str])
    """Addresses of proxies whose `X-Forwarded-Proto` and `X-Forwarded-For` are believed."""

    tls_certificate: str = ""
    """PEM file of a certificate, with its chain, to serve HTTPS. Empty: HTTP."""

    tls_key: str = ""
    """PEM file of the certificate's private key. Empty: it is in `tls_certificate`."""

    clients: list[ClientConfig] = Field(default_factory=list[ClientConfig])
    """Clients with tokens and limits of their own, besides the shared token."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Number of claims after which an episode is recorded as failed."""

    call_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a model call may wait for the engine, and a request to the server of a role may take."""

    max_claim_s: float = Field(default=7200.0, gt=0)
    """Maximum lifetime of a claim in seconds, however often its client renews it."""

    processes: int = Field(default=1, ge=1, le=64)
    """Processes that answer model calls. With more than one, each owns a share of the claims, at the port and
    the path in their base URLs (`http://SERVER:10088/g/2/v1`), and the server itself keeps the episodes
    (docs/cluster.md)."""

    store: str = "sqlite"
    """Where the run's ledger is: `sqlite` (in the run's folder), `sqlite:///PATH`, or
    `postgresql://USER@HOST/DATABASE` (docs/failover.md)."""

    durability: Literal["normal", "full"] = "normal"
    """What a commit survives: `normal`, a killed process; `full`, also a power failure (one disk sync per
    commit). With PostgreSQL that is up to the database, and `full` refuses one with `fsync` off."""

    max_reward: float = Field(default=MAX_REWARD, gt=0, le=MAX_REWARD)
    """Maximum magnitude of a reward. With clients that you do not trust, set it to what the task's scorer can
    give: one huge reward decides the direction of a whole step."""

    max_tokens_per_claim: int = Field(default=4_000_000, ge=1)
    """Maximum number of tokens sampled per claim."""

    model_names: list[str] = Field(default_factory=list[str])
    """Names by which programs may call the model, besides `policy` and its own. Empty: any name."""

    @model_validator(mode="after")
    def _each_client_once(self) -> InterchangeConfig:
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError(f"each of `clients` needs a name of its own, got {names}")
        if self.tls_key and not self.tls_certificate:
            raise ValueError("tls_key needs a tls_certificate")
        return self
