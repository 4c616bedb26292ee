"""The sandbox: what is seen inside, what ends with it, what stays of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from sandboxes import said, started

from interchange_helpers import eventually
from tinkerscript.errors import IsolationError
from tinkerscript.isolation.bubblewrap import Bubblewrap


@pytest.fixture
async def sandbox() -> AsyncGenerator[Bubblewrap]:
    async with started() as sandbox:
        yield sandbox


async def shell(sandbox: Bubblewrap, script: str) -> str:
    return await said(sandbox, "sh", "-c", script)


def host_processes(mark: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", mark], stdout=subprocess.PIPE, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


async def test_nothing_of_this_machine_is_seen_but_its_programs(
    sandbox: Bubblewrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("a secret file")
    monkeypatch.setenv("SECRET_TOKEN", "a-secret-variable")
    everything = await shell(
        sandbox, f"env; cat {tmp_path}/secret /etc/shadow; ls -A / /root /home; cat /proc/*/environ"
    )
    assert "a secret" not in everything
    assert "a-secret" not in everything
    assert "root:" not in everything.replace("/root:", "")
    processes = await said(sandbox, "ps", "-eo", "pid,args")
    assert f" {os.getpid()} " not in processes
    assert len(processes.splitlines()) == 4, processes
    for attempt in ("touch /usr/x", "mount -t tmpfs x /tmp", "unshare --user true", "echo x > /etc/ssl/x"):
        assert await shell(sandbox, f"({attempt}) 2> /dev/null && echo done") == "", attempt
    assert (await said(sandbox, "sh", "-c", "grep CapEff /proc/self/status")).split()[1] == "0" * 16


async def test_there_is_no_network_but_what_is_let_in(sandbox: Bubblewrap) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connect = (
        "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2); print('connected')"
    )
    for address in (("127.0.0.1", port), ("192.0.2.1", 80)):
        assert "connected" not in await said(sandbox, "python3", "-c", connect, *map(str, address))
    let_in = await asyncio.start_server(
        lambda reader, writer: writer.close(), sock=await sandbox.listen(port)
    )
    assert "connected" in await said(sandbox, "python3", "-c", connect, "127.0.0.1", str(port))
    for each in (server, let_in):
        each.close()
        await each.wait_closed()


async def test_a_daemon_ends_with_the_sandbox(sandbox: Bubblewrap) -> None:
    mark = f"sleep 31{os.getpid()}"
    await shell(sandbox, f"(setsid {mark} & setsid nohup {mark} &) > /dev/null 2>&1")
    assert len(host_processes(mark)) == 2
    await sandbox.stop()
    assert host_processes(mark) == []
    with pytest.raises(IsolationError, match="does not run"):
        sandbox.command(["true"])


async def test_a_program_that_ends_the_sandbox_ends_only_that(sandbox: Bubblewrap) -> None:
    await shell(sandbox, "kill -9 -1")

    async def ended() -> bool:
        return not sandbox.is_running

    await eventually(ended, "the end of the sandbox")
    await sandbox.start()
    assert await said(sandbox, "echo", "again") == "again\n"


async def test_work_stays_and_what_later_programs_trust_does_not(sandbox: Bubblewrap) -> None:
    await shell(sandbox, "mkdir /app; touch kept /app/kept")
    await shell(sandbox, "mkdir -p ~/.local; touch ~/.local/x /tmp/x; echo x > /etc/passwd")
    await shell(sandbox, "rm /bin; mkdir /bin; touch /bin/python3; chmod 0 /var")
    await sandbox.start()
    assert (await shell(sandbox, "ls /work /app")).split() == ["/app:", "kept", "/work:", "kept"]
    assert await shell(sandbox, "ls -A ~ /tmp") == "/home/agent:\n\n/tmp:\n"
    assert "agent" in await shell(sandbox, "cat /etc/passwd; readlink /bin")


async def test_links_out_of_the_work_folder_lead_nowhere(sandbox: Bubblewrap, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("this machine's")
    await shell(sandbox, f"mv /work /other; ln -s {tmp_path} /work; ln -s {tmp_path} /home/agent/link")
    await sandbox.start()
    assert await shell(sandbox, "ls -A /work") == ""
    assert (tmp_path / "kept").read_text() == "this machine's"


async def test_what_bubblewrap_says_reaches_the_user(
    sandbox: Bubblewrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IsolationError, match="cannot start a sandbox here: bwrap: Can't find source path"):
        await sandbox.start(readable=[tmp_path / "missing"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationError, match="apt-get install bubblewrap"):
        Bubblewrap()


TYPES = """
import fcntl, sys, termios
for name in ("/dev/tty", 0, 1, 2):
    try:
        with open(name, "rb", buffering=0, closefd=isinstance(name, str)) as terminal:
            for letter in b"touch typed\\n":
                fcntl.ioctl(terminal, termios.TIOCSTI, bytes([letter]))
        print("typed by", name, file=sys.stderr)
    except OSError as error:
        print("refused", name, error, file=sys.stderr)
"""
"""What types a command into the terminal that it can reach."""

WORKER = """
import asyncio, fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from tinkerscript.isolation.inspect_sandbox import BubblewrapSandbox

async def main():
    made = await BubblewrapSandbox.sample_init("task", None, {})
    sandbox = made["default"]
    try:
        command = sandbox.bubblewrap.command(["python3", "-c", sys.argv[1]])
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        print((await process.communicate())[1].decode(), file=sys.stderr)
        print((await sandbox.exec(["python3", "-c", sys.argv[1]])).stderr, file=sys.stderr)
    finally:
        await BubblewrapSandbox.sample_cleanup("task", None, made, False)

asyncio.run(main())
"""
"""A worker in a terminal: one command has the terminal as its streams, one is Inspect's."""


def test_a_program_cannot_type_into_the_workers_terminal() -> None:
    ours, terminal = os.openpty()
    try:
        worker = subprocess.run(
            [sys.executable, "-c", WORKER, TYPES],
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(terminal)
    told = worker.stderr.decode()
    assert worker.returncode == 0, told
    assert told.count("refused") == 8, told
    assert "typed by" not in told
