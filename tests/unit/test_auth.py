"""The secret file, the keys of claims and the tokens of roles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerscript.errors import ConfigError, UnauthorizedError
from tinkerscript.server.auth import (
    ADMIN_TOKEN,
    CLIENT_TOKEN,
    ClaimId,
    Roles,
    claim_key,
    is_loopback,
    load_secret,
    verify_key,
)

SECRET = bytes(range(32))


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.secret"
    secret = load_secret(path)
    assert len(secret) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(path) == secret
    assert os.listdir(tmp_path) == ["server.secret"]


def test_a_secret_that_others_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.secret"
    load_secret(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(path)


def test_a_broken_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.secret"
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="not 0"):
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


@given(junk=st.text(max_size=60))
def test_junk_opens_nothing(junk: str) -> None:
    assert verify_key(SECRET, junk) is None
    assert verify_key(SECRET, f"ts-{junk}") is None


@given(data=st.data())
def test_a_key_with_one_character_changed_opens_nothing(data: st.DataObject) -> None:
    key = claim_key(SECRET, "episode", 1)
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters().filter(lambda character: character != key[place]))
    assert verify_key(SECRET, key[:place] + other + key[place + 1 :]) is None


@pytest.mark.parametrize("tail", ["=", " ", "\n", ".", "A"])
def test_a_key_has_one_spelling(tail: str) -> None:
    key = claim_key(SECRET, "episode", 1)
    assert verify_key(SECRET, key + tail) is None
    assert verify_key(SECRET, key.replace(".1.", ".01.")) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_without_tokens_both_roles_are_open(host: str) -> None:
    assert is_loopback(host)
    roles = Roles.for_host(host, {})
    roles.require("client", "")
    roles.require("admin", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "example.org"])
@pytest.mark.parametrize(
    "environ", [{}, {CLIENT_TOKEN: "a"}, {ADMIN_TOKEN: "a"}, {CLIENT_TOKEN: "", ADMIN_TOKEN: "a"}]
)
def test_elsewhere_both_tokens_are_needed(host: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Roles.for_host(host, environ)
    for name in (CLIENT_TOKEN, ADMIN_TOKEN):
        assert (name in str(caught.value)) == (not environ.get(name))


def test_roles_are_separate() -> None:
    roles = Roles.for_host("0.0.0.0", {CLIENT_TOKEN: "c-token", ADMIN_TOKEN: "a-token"})
    roles.require("client", "Bearer c-token")
    roles.require("client", "Bearer a-token")
    roles.require("admin", "Bearer a-token")
    for role, header, status in (
        ("admin", "Bearer c-token", 403),
        ("admin", "", 401),
        ("client", "Bearer wrong", 401),
        ("client", "c-token ", 401),
        ("client", "Bearer ünicode", 401),
    ):
        with pytest.raises(UnauthorizedError) as caught:
            roles.require(role, header)  # type: ignore[arg-type]
        assert caught.value.status == status
        assert "c-token" not in str(caught.value)
    assert "token" not in repr(roles).replace("client_token", "").replace("admin_token", "")


def test_a_client_token_without_an_admin_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="set both"):
        Roles.for_host("127.0.0.1", {CLIENT_TOKEN: "c"})
    Roles.for_host("127.0.0.1", {ADMIN_TOKEN: "a"}).require("client", "")
