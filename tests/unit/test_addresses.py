"""Where the server listens."""

from __future__ import annotations

import socket

import pytest

from tinkerscript import addresses
from tinkerscript.addresses import ServerInfo, bind_http, http_url, listen, moved_to, remote_url
from tinkerscript.config import InterchangeConfig
from tinkerscript.errors import ConfigError


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_other_machines_are_told_an_address_that_reaches_this_one(host: str, name: str) -> None:
    with bind_http(
        InterchangeConfig(interchange_server_port=0, interchange_server_host=host), None
    ) as listener:
        port = listener.getsockname()[1]
        assert http_url(listener) == f"http://127.0.0.1:{port}"
        assert remote_url(http_url(listener), host) == f"http://{name}:{port}"


def test_a_server_beside_another_takes_a_free_port_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody chose the default port. One that somebody chose, or tells clients of, is in use or it is not."""
    with listen("127.0.0.1", 0) as taken:
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(addresses, "DEFAULT_PORT", port)
        by_default = InterchangeConfig()
        with bind_http(by_default, None) as first:
            url = http_url(first)
            assert url != http_url(taken)
            assert moved_to(by_default, url) == f" (port {port} was in use)"
        with bind_http(by_default, ServerInfo(url, "", 1, "")) as again:
            assert http_url(again) == url, "a restarted server is where it was"
        for chosen in (
            InterchangeConfig(interchange_server_port=port),
            InterchangeConfig(public_base_url="https://train.example.org"),
        ):
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
                bind_http(chosen, None)
    with bind_http(by_default, None) as alone:
        assert (http_url(alone), moved_to(by_default, http_url(alone))) == (f"http://127.0.0.1:{port}", "")
