"""A link that leaves the machine: only the trainer's key connects, and who is refused is counted."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from interchange_helpers import FAST, eventually, new_episodes, run_config, trainer, until
from tinkerscript.addresses import ServerInfo
from tinkerscript.errors import ConfigError
from tinkerscript.processes.children import ServerAddress
from tinkerscript.server.process import running_server
from tinkerscript.trainer_link.keys import (
    ServerKeys,
    TrainerKeys,
    load_server_keys,
    load_trainer_keys,
    make_link_keys,
)


@asynccontextmanager
async def serving(run_dir: Path, model: Path, **interchange: Any) -> AsyncGenerator[ServerInfo]:
    config = run_config(model, **{"interchange_method": "tcp"} | interchange)
    async with running_server(config, run_dir, environ={}, times=FAST) as (info, task):
        yield info
        assert not task.done()


async def refusals(info: ServerInfo, reason: str) -> float:
    async with httpx.AsyncClient(base_url=info.url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    name = f'tinkerscript_link_drops_total{{reason="{reason}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def connected(info: ServerInfo) -> bool:
    async with httpx.AsyncClient(base_url=info.url) as http:
        return (await http.get("/get_engine_status")).json()["trainer_connected"]


def other_keys(**replaced: bytes) -> TrainerKeys:
    public, secret = zmq.curve_keypair()
    return TrainerKeys(**{"public": public, "secret": secret, "server_public": public} | replaced)


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "tcp://127.0.0.1:"), ("0.0.0.0", "tcp://127.0.0.1:"), ("::1", "tcp://[::1]:")],
)
async def test_the_trainers_key_opens_the_link(
    tmp_path: Path, byte_model: Path, host: str, address: str
) -> None:
    async with serving(tmp_path, byte_model, link_host=host) as info:
        assert info.link_address.startswith(address)
        keys = ServerAddress(info.url, info.link_address, Path(info.link_keys)).trainer_keys()
        async with trainer(info.link_address, keys=keys) as link:
            await link.register(new_episodes("e"))
            await link.flush()
            assert link.refused_handshakes == 0
        assert await refusals(info, "wrong_key") == await refusals(info, "handshake") == 0


async def test_the_links_host_is_an_address(tmp_path: Path, byte_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"link_host: 'trainer\.local' is not an IP address"):
        async with serving(tmp_path, byte_model, link_host="trainer.local"):
            pass


@pytest.mark.parametrize("who", ["a stranger", "without keys", "meant for another server"])
async def test_every_other_connection_is_refused_and_counted(
    tmp_path: Path, byte_model: Path, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="tinkerscript")
    async with serving(tmp_path, byte_model) as info:
        right = load_trainer_keys(Path(info.link_keys))
        keys, reason = {
            "a stranger": (other_keys(server_public=right.server_public), "wrong_key"),
            "without keys": (None, "handshake"),
            "meant for another server": (other_keys(public=right.public, secret=right.secret), "handshake"),
        }[who]
        async with trainer(info.link_address, keys=keys) as intruder:

            async def refused() -> bool:
                return await refusals(info, reason) >= 1

            await eventually(refused, "the refusal")
            assert not await connected(info)
            assert intruder.server_id == ""
            if who == "a stranger":
                await until(lambda: intruder.refused_handshakes >= 1, "the trainer's own notice")
            async with trainer(info.link_address, keys=right) as link:
                await link.register(new_episodes("e"))
    assert "link.refused" in caplog.text
    assert "link.takeover" not in caplog.text
    assert right.secret.decode() not in caplog.text


async def test_a_trainer_with_keys_does_not_trust_a_server_without(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, interchange_method="ipc") as info:
        assert info.link_keys == ""
        async with trainer(info.link_address, keys=other_keys()) as link:
            await until(lambda: link.refused_handshakes >= 1)
            assert link.server_id == ""
            assert not await connected(info)


def test_keys_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "link_keys"
    start = threading.Barrier(4)

    def make(_: int) -> ServerKeys:
        start.wait()
        make_link_keys(folder)
        return load_server_keys(folder)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, range(4)))
    assert made == [made[0]] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["link_keys"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    theirs = load_trainer_keys(folder)
    assert (theirs.server_public, theirs.public) == (made[0].public, made[0].trainer_public)
    assert made[0].secret.decode() not in repr(made[0])
    assert theirs.secret.decode() not in repr(theirs)


def test_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.key_secret contains no key.*copy the folder 'link_keys'"
    ):
        load_trainer_keys(tmp_path)
    folder = tmp_path / "link_keys"
    make_link_keys(folder)
    (folder / "server.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.key_secret must be owned by this user"):
        load_server_keys(folder)
    (folder / "server.key_secret").chmod(0o600)
    (folder / "trainer.key").write_text('public-key = "short"\n')
    with pytest.raises(ConfigError, match=r"trainer\.key contains no key"):
        load_server_keys(folder)
    (folder / "trainer.key_secret").write_bytes((folder / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"trainer\.key_secret contains no secret key"):
        load_trainer_keys(folder)
    with pytest.raises(ConfigError, match="cannot create the link's keys"):
        make_link_keys(tmp_path / "nowhere" / "link_keys")
