"""Clients with tokens and limits of their own, TLS, proxies, and what strangers do not see."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import write_certificate
from interchange_helpers import new_episodes, run_config
from interchange_setup import Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import ConfigError, ServerUnreachableError
from tinkerscript.server.process import running_server

TOKENS = {
    CLIENT_TOKEN: "shared-token-of-tests",
    ADMIN_TOKEN: "admin-token-of-tests",
    "ANN_TOKEN": "token-of-ann-alone",
    "BOB_TOKEN": "token-of-bob-alone",
}
ANN = {"name": "ann", "token_env": "ANN_TOKEN", "max_claims": 2}
BOB = {"name": "bob", "token_env": "BOB_TOKEN"}


async def ask(setup: Setup, who: str, path: str, **body: Any) -> httpx.Response:
    """A request under the token of `who`."""
    headers = {"Authorization": f"Bearer {TOKENS[who]}"}
    return await setup.http.post(path, json=body, headers=headers)


def refusal(reply: httpx.Response) -> tuple[int, str, bool]:
    return reply.status_code, reply.json()["failure_reason"], "Retry-After" in reply.headers


async def test_each_client_has_its_own_limits_and_refusals_name_them(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, clients=[ANN, BOB]) as setup:
        await setup.link.register(new_episodes(*"abcd"))
        first = await ask(
            setup, "ANN_TOKEN", "/claim_episode", client_uuid="w", sends_key=True, max_episodes=5
        )
        assert (first.json()["success"], len(first.json()["more"])) == (True, 1), "two, and no more"
        status, reason, retry = refusal(await ask(setup, "ANN_TOKEN", "/claim_episode", client_uuid="other"))
        assert (status, "clients: ann.max_claims" in reason, retry) == (429, True, True)
        shared = await ask(setup, CLIENT_TOKEN, "/claim_episode", client_uuid="w", sends_key=True)
        assert shared.json()["success"], "the shared token has none of these limits"

        for path in ("/claim_episode", "/register_episode"):
            body = {"client_uuid": "bob", "pool": "bob", "episode_uuid": "x", "task_id": "t"}
            status, reason, retry = refusal(await ask(setup, "ANN_TOKEN", path, **body))
            assert (status, "the trainer's pool and its own" in reason, retry) == (403, True, False)
        mine = await ask(setup, "ANN_TOKEN", "/register_episode", episode_uuid="x", client_uuid="ann")
        assert mine.status_code == 200, mine.text
        assert (await ask(setup, "ANN_TOKEN", "/get_episode_buffer")).status_code == 403


async def test_claims_of_a_client_with_its_own_token_stay_its_own(tmp_path: Path, byte_model: Path) -> None:
    """At its limit a lost reply is repeated, nobody else gets it, and a restart forgets none of it."""
    body = {"client_uuid": "w", "sends_key": True, "max_episodes": 2, "claim_request_id": "r"}
    async with serving(tmp_path, byte_model, environ=TOKENS, clients=[ANN, BOB]) as setup:
        await setup.link.register(new_episodes(*"abcde"))
        first = (await ask(setup, "ANN_TOKEN", "/claim_episode", **body)).json()
        assert first["client_uuid"] == "ann/w"
        repeated = (await ask(setup, "ANN_TOKEN", "/claim_episode", **body)).json()
        assert repeated["openai_api_key"] == first["openai_api_key"]
        other = (await ask(setup, "BOB_TOKEN", "/claim_episode", **body)).json()
        assert {other["episode_uuid"], other["more"][0]["episode_uuid"]} == {"c", "d"}, "bob's own"
        for client in ("w", "ann/w"):
            stolen = await ask(setup, CLIENT_TOKEN, "/claim_episode", **(body | {"client_uuid": client}))
            assert stolen.json().get("episode_uuid", "") in ("", "e")
        assert refusal(stolen) == (403, stolen.json()["failure_reason"], False)
    async with serving(tmp_path, byte_model, environ=TOKENS, clients=[ANN, BOB]) as setup:
        more = body | {"claim_request_id": "another", "wait_s": 5}
        assert refusal(await ask(setup, "ANN_TOKEN", "/claim_episode", **more))[0] == 429
        assert (await ask(setup, "ANN_TOKEN", "/claim_episode", **body)).json()["episode_uuid"] == "a"


async def test_strangers_see_no_api_status_or_metrics_where_tokens_are_set(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, clients=[ANN]) as setup:
        for path in ("/openapi.json", "/metrics", "/get_engine_status"):
            assert (await setup.http.get(path)).status_code == 401
            for who in ("ANN_TOKEN", CLIENT_TOKEN, ADMIN_TOKEN):
                headers = {"Authorization": f"Bearer {TOKENS[who]}"}
                assert (await setup.http.get(path, headers=headers)).status_code == 200
        assert (await setup.http.get("/health")).status_code == 200
        for key in ("", "Bearer wrong"):
            claim = await setup.http.post(
                "/claim_episode", json={"client_uuid": "c"}, headers={"Authorization": key}
            )
            assert claim.status_code == 401


async def test_https_by_two_options_and_a_ca_file(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(tmp_path)
    tls = {"tls_certificate": str(certificate), "tls_key": str(key)}
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with serving(tmp_path, byte_model, verify=trusting, **tls) as setup:
        assert setup.url.startswith("https://127.0.0.1:")
        await setup.link.register(new_episodes("e", "f"))
        async with AsyncTinkerScriptClient(setup.url, ca_file=str(certificate)) as client:
            episode = await client.begin_episode()
            assert episode.openai_base_url == f"{setup.url}/v1"
            assert (await setup.call(episode.openai_api_key)).status_code == 200
            await client.end_episode(episode, 1.0)
        async with AsyncTinkerScriptClient(setup.url, timeout_s=0.0) as wary:
            with pytest.raises(ServerUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                await wary.begin_episode()
        monkeypatch.setenv("TINKERSCRIPT_CA_FILE", str(certificate))
        async with AsyncTinkerScriptClient(setup.url) as told:
            assert (await told.begin_episode()).episode_uuid == "f"
    for broken in (tls | {"tls_key": str(certificate)}, {"tls_certificate": str(tmp_path / "nowhere.pem")}):
        with pytest.raises(ConfigError, match=r"interchange_server\.tls_certificate, tls_key: "):
            async with running_server(run_config(byte_model, **broken), tmp_path, environ={}):
                raise AssertionError


@pytest.mark.parametrize(
    ("proxies", "scheme"), [(["127.0.0.1"], "https"), ([], "http"), (["10.0.0.1"], "http")]
)
async def test_a_proxys_word_about_https_counts_if_it_is_configured(
    tmp_path: Path, byte_model: Path, proxies: list[str], scheme: str
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, trusted_proxies=proxies) as setup:
        await setup.link.register(new_episodes("e", "f"))
        forwarded = {
            "X-Forwarded-Proto": "https",
            "X-Forwarded-For": "203.0.113.9",
            "Host": "train.example.org",
        }
        for headers, expected in ((forwarded, scheme), ({"Host": "train.example.org"}, "http")):
            body = {"client_uuid": "c", "sends_key": True}
            reply = await setup.http.post("/claim_episode", json=body, headers=headers | setup.member)
            assert reply.json()["openai_base_url"] == f"{expected}://train.example.org/v1"
