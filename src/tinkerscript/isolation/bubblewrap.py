"""`Bubblewrap`: a sandbox made of Linux namespaces, with Debian's `bwrap` and util-linux's `nsenter`.

Inside, the root is a folder of the sandbox's own, with this machine's programs mounted read-only. Programs
see no process but the sandbox's, no network but a loopback interface, no terminal, and no variable but what
they are given. They have no capability. What they may use of memory, processes and files is limited if it is
asked for (`ResourceLimits`); processor time and the disk as a whole are not. Memory and processes are counted
by a control group (cgroups, version 1 or 2) where this process may make one below its own, and otherwise by
the limits that each process has (setrlimit).

Invariants: when `stop` returns, no process of the sandbox is alive, whatever it forked or detached. When the
process that started it ends, however it ends, the sandbox's processes end and its files are removed. A limit
that nothing enforces here is refused before anything runs.

Source: https://github.com/containers/bubblewrap, namespaces(7), nsenter(1), cgroups(7), getrlimit(2),
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import array
import asyncio
import atexit
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tinkerscript.errors import IsolationError

MIN_PROCESSES = 16
"""A sandbox and one command in it are some processes already."""

_MOUNT = Path("/sys/fs/cgroup")
_REMOVED_WITHIN_S = 5.0


class ResourceLimits(BaseModel):
    """What the programs in a sandbox may use. None: as much as this machine has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int | None = Field(default=None, ge=1)
    """MiB of memory that they use together, with the files that they keep in memory. Beyond it the kernel
    kills one of them. Without control groups: MiB of data of each process, whose next allocation fails."""

    processes: int | None = Field(default=None, ge=MIN_PROCESSES)
    """Processes and threads at a time, those of the sandbox itself included (two, and two for each command).
    Beyond it none can be started."""

    file_mb: int | None = Field(default=None, ge=1)
    """MiB of the longest file that can be written."""


class LimitedProcesses:
    """The processes of one sandbox: what their commands begin with, so that they are limited."""

    def __init__(self, name: str, limits: ResourceLimits) -> None:
        """Make the control groups. `name` is theirs, and nobody else's.

        Raises IsolationError for `processes` where neither control groups nor the kernel's limit on a user's
        processes, which root does not have, can enforce it.
        """
        self._groups: list[Path] = []
        self._in_group = ""
        each = {"fsize": limits.file_mb and limits.file_mb * 2**20}
        if (limits.memory_mb or limits.processes) and not self._join_group(name, limits):
            if limits.processes and os.geteuid() == 0:
                raise IsolationError(
                    "processes: root can limit them only by control groups, and can make none below "
                    f"{_MOUNT} here; run the worker as another user, or leave the limit out"
                )
            each |= {"data": limits.memory_mb and limits.memory_mb * 2**20, "nproc": limits.processes}
        options = [f"--{name}={value}" for name, value in each.items() if value]
        self.inside = ["/usr/bin/prlimit", *options] if options else []
        """What comes before a command in the sandbox. Only there: a limit on processes is kept for each user
        namespace, and outside it would count everything that the user runs."""

    @property
    def outside(self) -> list[str]:
        """What comes before the command that enters the sandbox, or makes it."""
        return ["/bin/sh", "-c", f'{self._in_group}exec "$@"', "sh"] if self._groups else []

    async def remove(self) -> None:
        """Remove the groups, once their processes have ended. Idempotent."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _REMOVED_WITHIN_S
        while self._groups:
            group = self._groups[-1]
            try:
                group.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # A command that entered the sandbox ends a moment after it.
                if loop.time() > until:
                    raise
                _kill_all(group)
                await asyncio.sleep(0.01)
                continue
            self._groups.pop()

    def _join_group(self, name: str, limits: ResourceLimits) -> bool:
        """Whether there are groups for all that is limited."""
        made = dict[Path, dict[str, int]]()
        for controller, limit in (("memory", limits.memory_mb), ("pids", limits.processes)):
            if not limit:
                continue
            parent, file = _parent_of(controller)
            if parent is None:
                return False
            bytes_or_count = limit * 2**20 if controller == "memory" else limit
            made.setdefault(parent / name, {})[file] = bytes_or_count
        try:
            for group, settings in made.items():
                group.mkdir()
                self._groups.append(group)
                for file, value in settings.items():
                    (group / file).write_text(str(value))
        except OSError:
            for group in self._groups:
                group.rmdir()
            self._groups.clear()
            return False
        self._in_group = "".join(
            f"echo 0 > {shlex.quote(str(group / 'cgroup.procs'))} && " for group in self._groups
        )
        return True


def group_parents() -> list[Path]:
    """The folders in which `LimitedProcesses` makes its groups."""
    found = (_parent_of(controller)[0] for controller in ("memory", "pids"))
    return list(dict.fromkeys(parent for parent in found if parent is not None))


def _parent_of(controller: str) -> tuple[Path | None, str]:
    """The group in which this process may make groups that limit `controller`, and the limit's file."""
    for number, controllers, path in _own_groups():
        if controller in controllers:
            file = "memory.limit_in_bytes" if controller == "memory" else "pids.max"
            parent = _MOUNT / controller / path
            return (parent if os.access(parent, os.W_OK) else None), file
        if number == 0:
            own = _MOUNT / path
            for group in (own, *own.parents):
                if not group.is_relative_to(_MOUNT):
                    break
                if _passes_on(group, controller):
                    return group, f"{controller}.max"
    return None, ""


def _passes_on(group: Path, controller: str) -> bool:
    """Whether groups may be made in this one that limit `controller` (version 2)."""
    try:
        passed_on = (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return controller in passed_on and os.access(group / "cgroup.procs", os.W_OK)


def _own_groups() -> Iterator[tuple[int, list[str], str]]:
    """Hierarchy, its controllers (version 2 has hierarchy 0 and names none), and this process's group."""
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            yield int(number), controllers.split(","), path.lstrip("/")


def _kill_all(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


USER_ID = 1000
WORK = "/work"
"""Where commands run."""

HOME = "/home/agent"

_FOLDERS = ("home/agent", "tmp", "var/tmp", "run", "opt", "etc", "root")
"""Folders of every sandbox besides `/work`. `root` is there for programs that look for it."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_RESERVED = sorted(
    {"dev", "proc", *(path.split("/")[1] for path in _SYSTEM), *(path.split("/")[0] for path in _FOLDERS)}
)
_SETTINGS = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "ssl",
)
"""What is shown of `/etc`."""

_ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "hosts: files\n",
}

_READY = b"ready\n"
_START_S = 20.0
"""Seconds that a sandbox may take to start."""

_NAMESPACES = ("--user", "--preserve-credentials", "--mount", "--pid", "--net", "--ipc", "--uts")

_NS_GET_PARENT = 0xB702
"""ioctl_ns(2)"""

_LISTEN = """
import array, socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
sent = array.array("i", [listening.fileno()])
socket.socket(fileno=0).sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
"""
"""Runs in a sandbox's network, outside of the rest: passes on the socket that it listens with."""

_SWEEP = """
cat > /dev/null
while [ -e "$0" ]; do chmod -R u+rwX "$0" 2> /dev/null; rm -rf "$0" 2> /dev/null || sleep 0.1; done
for names in "$@"; do for group in "$names"-*; do
    while [ -e "$group" ]; do rmdir "$group" 2> /dev/null || sleep 0.1; done
done; done
"""
"""Removes a folder when standard input closes, and the control groups whose names begin like the arguments;
stays until that has worked."""


NO_LIMITS = ResourceLimits()


class Bubblewrap:
    """One sandbox. It belongs to the event loop that starts it."""

    def __init__(self, limits: ResourceLimits = NO_LIMITS) -> None:
        """Make the sandbox's folder; nothing runs yet.

        Raises IsolationError if `bwrap` or `nsenter` is not installed, and for limits that cannot be enforced
        here.
        """
        for program, package in (("bwrap", "bubblewrap"), ("nsenter", "util-linux")):
            if shutil.which(program) is None:
                raise IsolationError(f"{program} is not installed; install it: apt-get install {package}")
        self.root = Path(tempfile.mkdtemp(dir=_folder_of_this_process()))
        """The folder that programs in the sandbox see as `/`. Do not follow its links: they are theirs."""

        self._process: asyncio.subprocess.Process | None = None
        self._init = -1
        """Descriptor of the sandbox's first process, with which all others end."""

        self._init_pid = 0
        self._owner = -1
        """Descriptor of the user namespace that owns the others, in which this user may enter them."""

        self._lay_out()
        try:
            self._limited = LimitedProcesses(f"{self.root.parent.name}-{self.root.name}", limits)
        except IsolationError:
            _remove(self.root)
            raise

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, readable: Iterable[Path] = ()) -> None:
        """Start the sandbox. `readable`: folders of this machine to mount read-only, besides its system's and
        those of the Python that runs this.

        What an earlier start left stays in `/work` and in folders that are not the system's; everything else,
        such as the home folder and `/tmp`, is new. Raises IsolationError with bwrap's own words, such as that
        user namespaces are not allowed here.
        """
        await self.stop()
        await asyncio.to_thread(self._lay_out)
        status, sent = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._limited.outside,
                *_bwrap(self.root, [Path(sys.base_prefix), *readable], sent),
                *self._limited.inside,
                *("/bin/sh", "-c", "echo ready; exec sleep infinity"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(sent,),
                env={},
            )
        finally:
            os.close(sent)
        with os.fdopen(status, "rb") as lines:
            await self._until_ready(process)
            self._init_pid = json.loads(lines.readline())["child-pid"]
        self._init = os.pidfd_open(self._init_pid)
        self._owner = _owner_of(self._init_pid)
        self._process = process

    def command(
        self, arguments: Sequence[str], *, cwd: str = WORK, environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command line that runs `arguments` in the sandbox; `cwd` relative to `/work`.

        Raises IsolationError if the sandbox does not run.
        """
        variables = DEFAULT_ENVIRONMENT | dict(environment or {})
        # The first `env` keeps this process's variables from the one that enters the namespaces.
        return [
            *("/usr/bin/env", "-i", *self._limited.outside, *self._entered(*_NAMESPACES)),
            # In a session of its own it has no terminal: it could type commands into the user's shell.
            "/usr/bin/setsid",
            *self._limited.inside,
            *(
                "/usr/bin/env",
                "-C",
                os.path.join(WORK, cwd),
                *(f"{name}={value}" for name, value in variables.items()),
            ),
            *arguments,
        ]

    async def listen(self, port: int) -> socket.socket:
        """A socket that listens on the sandbox's loopback interface, for this process to accept from."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *self._entered("--user", "--preserve-credentials", "--net"),
                *(sys.executable, "-I", "-S", "-c", _LISTEN, str(port)),
                stdin=theirs.fileno(),
                stderr=subprocess.PIPE,
                env={},
            )
            _, said = await process.communicate()
            if process.returncode:
                raise IsolationError(
                    f"nothing can listen in the sandbox: {said.decode(errors='replace').strip()}"
                )
            descriptors = array.array("i")
            _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(descriptors.itemsize))
        descriptors.frombytes(ancillary[0][2])
        return socket.socket(fileno=descriptors[0])

    async def stop(self) -> None:
        """End every process; the files stay. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # It ended by itself, and the others with it.
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        os.close(self._init)
        os.close(self._owner)
        # bwrap waits for the first process, and the kernel ends that one last.
        await process.communicate()

    async def remove(self) -> None:
        """End every process and remove the files. Idempotent."""
        await self.stop()
        await self._limited.remove()
        if self.root.exists():
            await asyncio.to_thread(_remove, self.root)

    def _lay_out(self) -> None:
        """Make the folders anew that programs trust or that are the system's."""
        for name in _RESERVED:
            _remove(self.root / name)
        for folder in _FOLDERS:
            (self.root / folder).mkdir(parents=True)
        work = self.root / WORK[1:]
        if work.is_symlink() or not work.is_dir():
            _remove(work)
            work.mkdir()
        for name, text in _ETC.items():
            (self.root / "etc" / name).write_text(text)

    def _entered(self, *namespaces: str) -> list[str]:
        if not self.is_running:
            raise IsolationError("the sandbox does not run: it was stopped, or a program in it ended it")
        owner = f"--user=/proc/{os.getpid()}/fd/{self._owner}"
        return [
            *("/usr/bin/nsenter", owner, "--preserve-credentials", "--"),
            *("/usr/bin/nsenter", f"--target={self._init_pid}", *namespaces, "--"),
        ]

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                if await process.stdout.readline() == _READY:
                    return
        except TimeoutError:
            process.kill()
        except BaseException:
            process.kill()
            await process.communicate()
            raise
        _, said = await process.communicate()
        words = said.decode(errors="replace").strip() or f"it did not start within {_START_S:g} s"
        raise IsolationError(f"bubblewrap cannot start a sandbox here: {words}")


DEFAULT_ENVIRONMENT = {
    "PATH": f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""What every command gets, unless its own environment says otherwise."""


def _owner_of(pid: int) -> int:
    # bwrap makes the namespaces as root of one user namespace, and runs programs in another one below it.
    with open(f"/proc/{pid}/ns/user", "rb") as own:
        return fcntl.ioctl(own, _NS_GET_PARENT)


def _remove(path: Path) -> None:
    """Remove what is there, whatever the modes of the folders in it; links are not followed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        subprocess.run(["chmod", "-R", "u+rwX", path], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(path)


def _bwrap(root: Path, readable: Iterable[Path], status: int) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--clearenv"]
    if os.geteuid() == 0:
        # Without it a program may make user namespaces of its own, in which it is root; nobody else can enter
        # the sandbox with it.
        arguments += ["--disable-userns"]
    arguments += ["--bind", str(root), "/"]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for name in _SETTINGS:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for folder in dict.fromkeys(path.resolve() for path in readable):
        if not folder.is_relative_to("/usr"):
            arguments += ["--ro-bind", str(folder), str(folder)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/dev/null", "/dev/tty"]
    arguments += ["--chdir", WORK, "--json-status-fd", str(status)]
    return ["bwrap", *arguments, "--"]


_folder: Path | None = None


def _folder_of_this_process() -> Path:
    """The folder of all sandboxes of this process, which a process of its own removes after its end."""
    global _folder
    if _folder is None or not _folder.exists():
        folder = Path(tempfile.mkdtemp(prefix="tinkerscript-sandboxes-"))
        groups = [parent / folder.name for parent in group_parents()]
        sweeper = subprocess.Popen(
            ["/bin/sh", "-c", _SWEEP, str(folder), *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},
        )
        atexit.register(sweeper.communicate)
        _folder = folder
    return _folder
