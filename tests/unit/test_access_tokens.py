"""The secret file, the keys of claims and the tokens of roles."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerscript.access_tokens import (
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    ClaimId,
    ClaimKeys,
    Roles,
    claim_alias,
    claim_key,
    is_loopback,
    load_secret,
    read_token,
    verify_alias,
    verify_key,
)
from tinkerscript.config import InterchangeConfig
from tinkerscript.errors import ConfigError, UnauthorizedError

SECRET = bytes(range(32))
LONG = "sixteen-letters!"
HERE = InterchangeConfig(interchange_server_host="127.0.0.1")
EVERYWHERE = InterchangeConfig(interchange_server_host="0.0.0.0")


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.secret"
    secret = load_secret(path)
    assert len(secret) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret
    assert os.listdir(tmp_path) == ["server.secret"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(path)


@given(uuid=st.text(min_size=1, max_size=40), attempt=st.integers(1, 1000))
def test_a_key_opens_its_claim_and_no_other(uuid: str, attempt: int) -> None:
    key = claim_key(SECRET, uuid, attempt)
    assert key.startswith("ts-")
    assert verify_key(SECRET, key) == ClaimId(uuid, attempt)
    assert verify_key(bytes(32), key) is None
    head, _, mac = key.rpartition(".")
    name, _, number = head.rpartition(".")
    assert verify_key(SECRET, f"{name}.{int(number) + 1}.{mac}") is None


def test_a_key_opens_its_claim_however_many_were_made_since_and_after_a_restart() -> None:
    keys, longest = ClaimKeys(SECRET, Roles()), "\U0001f600" * 200
    key = keys.key(longest, 1)
    assert keys.opened_by(key) == (longest, 1)
    for number in range(20_000):  # More than it remembers.
        keys.key("other", number)
    assert keys.opened_by(key) == (longest, 1)
    assert ClaimKeys(SECRET, Roles()).opened_by(key) == (longest, 1)
    assert keys.opened_by(key[:-1]) is None


@given(uuid=st.text(min_size=1, max_size=40), attempt=st.integers(1, 1000))
def test_an_alias_names_its_claim_and_is_no_key(uuid: str, attempt: int) -> None:
    alias = claim_alias(SECRET, uuid, attempt)
    assert verify_alias(SECRET, alias) == ClaimId(uuid, attempt)
    assert verify_alias(bytes(32), alias) is verify_key(SECRET, alias) is None
    assert verify_alias(SECRET, claim_key(SECRET, uuid, attempt)) is None
    assert verify_alias(SECRET, alias.replace(f"~{attempt}~", f"~{attempt + 1}~")) is None
    assert verify_alias(SECRET, alias + "A") is None


@given(data=st.data())
def test_a_key_has_one_spelling(data: st.DataObject) -> None:
    key = claim_key(SECRET, "episode", 1)
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters().filter(lambda character: character != key[place]))
    assert verify_key(SECRET, key[:place] + other + key[place + 1 :]) is None
    assert verify_key(SECRET, key.replace(".1.", ".01.")) is None
    for tail in ("=", " ", "\n", ".", "A"):
        assert verify_key(SECRET, key + tail) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_without_tokens_both_roles_are_open(host: str) -> None:
    assert is_loopback(host)
    roles = Roles.of(InterchangeConfig(interchange_server_host=host), {})
    roles.require("client", "")
    roles.require("admin", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "example.org"])
@pytest.mark.parametrize(
    "environ", [{}, {CLIENT_TOKEN: LONG}, {ADMIN_TOKEN: LONG}, {CLIENT_TOKEN: "", ADMIN_TOKEN: LONG}]
)
def test_elsewhere_both_tokens_are_needed(host: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Roles.of(InterchangeConfig(interchange_server_host=host), environ)
    for name in (CLIENT_TOKEN, ADMIN_TOKEN):
        assert (name in str(caught.value)) == (not environ.get(name))


def test_a_server_on_loopback_that_others_reach_needs_both_tokens() -> None:
    for section, named in (
        (InterchangeConfig(trusted_proxies=["127.0.0.1"]), "trusted_proxies: a server behind 127.0.0.1"),
        (InterchangeConfig(public_base_url="https://a.example"), "public_base_url: 'https://a.example'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            Roles.of(section, {})
        assert not Roles.of(section, {CLIENT_TOKEN: LONG, ADMIN_TOKEN: LONG + "2"}).are_open
    assert Roles.of(InterchangeConfig(public_base_url="http://localhost:8080"), {}).are_open


def test_roles_are_separate() -> None:
    tokens = {CLIENT_TOKEN: "client-token-long", ADMIN_TOKEN: "admin-token-long"}
    roles = Roles.of(EVERYWHERE, tokens)
    roles.require("client", "Bearer client-token-long")
    roles.require("client", "Bearer admin-token-long")
    roles.require("admin", "Bearer admin-token-long")
    for role, header, status in (
        ("admin", "Bearer client-token-long", 403),
        ("admin", "", 401),
        ("client", "Bearer wrong", 401),
        ("client", "client-token-long ", 401),
        ("client", "Bearer ünicode", 401),
    ):
        with pytest.raises(UnauthorizedError) as caught:
            roles.require(role, header)  # type: ignore[arg-type]
        assert caught.value.status == status
        assert "client-token-long" not in str(caught.value)
    assert "token" not in repr(roles).replace("client_token", "").replace("admin_token", "")


@pytest.mark.parametrize("short", [CLIENT_TOKEN, ADMIN_TOKEN])
def test_a_short_token_is_refused_beyond_this_machine(short: str) -> None:
    environ = {CLIENT_TOKEN: LONG, ADMIN_TOKEN: LONG} | {short: LONG[:-1]}
    with pytest.raises(ConfigError, match=f"{short} must have at least 16 characters, not 15") as caught:
        Roles.of(EVERYWHERE, environ)
    assert LONG[:-1] not in str(caught.value)
    Roles.of(HERE, environ).require("client", f"Bearer {environ[CLIENT_TOKEN]}")


def token_file(folder: Path, text: str = LONG + "\n", mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"TOKEN_FILE: .*chmod 600"):
        read_token({f"{ADMIN_TOKEN}_FILE": token_file(tmp_path, mode=mode)}, ADMIN_TOKEN)


def test_a_token_file_that_is_missing_or_one_of_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read a token from .*nowhere"):
        read_token({f"{ADMIN_TOKEN}_FILE": str(tmp_path / "nowhere")}, ADMIN_TOKEN)
    with pytest.raises(ConfigError, match="both set"):
        read_token({f"{ADMIN_TOKEN}_FILE": token_file(tmp_path), ADMIN_TOKEN: LONG}, ADMIN_TOKEN)
    assert read_token({f"{ADMIN_TOKEN}_FILE": "", ADMIN_TOKEN: LONG}, ADMIN_TOKEN) == LONG
    assert read_token({f"{ADMIN_TOKEN}_FILE": token_file(tmp_path)}, ADMIN_TOKEN) == LONG


def test_a_client_token_without_an_admin_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="set both"):
        Roles.of(HERE, {CLIENT_TOKEN: "c"})
    for section in (HERE, EVERYWHERE):
        with pytest.raises(ConfigError, match="are equal, so every client would be an admin"):
            Roles.of(section, {CLIENT_TOKEN: LONG, ADMIN_TOKEN: LONG})
    Roles.of(HERE, {ADMIN_TOKEN: "a"}).require("client", "")
