"""The example's nginx in front of a server with two gateway processes."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from command_line import ROOT
from interchange_helpers import eventually, new_episodes
from interchange_setup import OUTPUT, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.addresses import read_server_info
from tinkerscript.model_folder import TINY_MODEL

EXAMPLE = ROOT / "examples" / "cluster" / "nginx.conf"

TOKENS = {CLIENT_TOKEN: "c" * 32, ADMIN_TOKEN: "a" * 32}

NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {servers}
}}
"""


@contextmanager
def nginx(folder: Path, ports: dict[int, int]) -> Iterator[None]:
    """The example's configuration, with other ports."""
    servers = EXAMPLE.read_text()
    for example, port in ports.items():
        assert f"{example};" in servers
        servers = servers.replace(f"{example};", f"{port};")
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers))
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    assert program is not None, "make cluster installs nginx"
    process = subprocess.Popen([program, "-c", config])
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


def free_ports(number: int) -> range:
    """Ports side by side, below those that connections of other tests get."""
    while True:
        ports = range(first := random.randrange(20_000, 30_000), first + number)
        with suppress(OSError), ExitStack() as sockets:
            for port in ports:
                sockets.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


async def test_one_address_leads_to_the_process_of_each_claim(tmp_path: Path) -> None:
    port, own, *_ = free_ports(4)
    url = f"http://127.0.0.1:{port}"
    public = {"public_base_url": url, "trusted_proxies": ["127.0.0.1"], "interchange_server_port": own}
    async with serving(tmp_path, TINY_MODEL, environ=TOKENS, processes=2, **public) as setup:
        info = read_server_info(tmp_path)
        assert info is not None
        first, second = info.gateway_ports
        behind = {8080: port, 10086: httpx.URL(info.url).port or 0, 10087: first, 10088: second}
        folder = tmp_path / "nginx"
        folder.mkdir()
        with nginx(folder, behind):
            member = {"Authorization": f"Bearer {TOKENS[CLIENT_TOKEN]}"}
            async with httpx.AsyncClient(base_url=url, headers=member, timeout=60) as setup.http:

                async def answers() -> bool:
                    try:
                        return (await setup.http.get("/health")).status_code == 200
                    except httpx.TransportError:
                        return False

                await eventually(answers)
                await setup.link.register(new_episodes(*(f"e{n}" for n in range(8))))
                claims = [await setup.claim() for _ in range(8)]
                assert {claim.openai_base_url for claim in claims} == {f"{url}/g/1/v1", f"{url}/g/2/v1"}
                for claim in claims:
                    key = {"Authorization": f"Bearer {claim.openai_api_key}"}
                    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}]}
                    path = f"{claim.openai_base_url}/chat/completions"
                    reply = await setup.http.post(path, json=body, headers=key)
                    assert reply.status_code == 200, reply.text
                    streamed = await setup.http.post(path, json=body | {"stream": True}, headers=key)
                    assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text
                    ended = {"episode_uuid": claim.episode_uuid, "attempt": 1, "workflow_output": OUTPUT}
                    assert (await setup.post("/end_episode", **ended))["success"]
