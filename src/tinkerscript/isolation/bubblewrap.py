"""`Bubblewrap` is a sandbox made of Linux namespaces, using Debian's `bwrap` and util-linux's `nsenter`.

The root is a private folder with this machine's programs mounted read-only. Programs have a loopback
interface, but no terminal, capabilities or view of other processes. Control groups (version 1 or 2) limit
memory and processes where possible, otherwise setrlimit limits each process. A limit that cannot be enforced
is refused.

`stop` ends every process of the sandbox. So does the end of the process that started it, even by SIGKILL; the
files are then removed too.

Sources: https://github.com/containers/bubblewrap, namespaces(7), nsenter(1), cgroups(7), getrlimit(2),
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

MIN_PROCESSES = 16  # The sandbox and one command need several.
_MOUNT = Path("/sys/fs/cgroup")
_REMOVED_WITHIN_S = 5.0


class ResourceLimits(BaseModel):
    """None means no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int | None = Field(default=None, ge=1)
    """All programs together, in MiB, with files kept in memory. Beyond it the kernel kills a program.

    Without control groups it limits each process's data.
    """

    # Includes threads, two for the sandbox and two for each command.
    processes: int | None = Field(default=None, ge=MIN_PROCESSES)
    file_mb: int | None = Field(default=None, ge=1)  # The largest file that can be written, in MiB.


class LimitedProcesses:
    def __init__(self, name: str, limits: ResourceLimits) -> None:
        """`name` must be unique on this machine.

        Raises IsolationError if `processes` cannot be enforced: without control groups, root has no limit.
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
        # It is per user namespace: outside, it would count all of the user's processes.
        self.inside = ["/usr/bin/prlimit", *options] if options else []

    @property
    def outside(self) -> list[str]:
        return ["/bin/sh", "-c", f'{self._in_group}exec "$@"', "sh"] if self._groups else []

    async def remove(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _REMOVED_WITHIN_S
        while self._groups:
            group = self._groups[-1]
            try:
                group.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # A command that entered the sandbox ends slightly later.
                if loop.time() > until:
                    raise
                _kill_all(group)
                await asyncio.sleep(0.01)
                continue
            self._groups.pop()

    def _join_group(self, name: str, limits: ResourceLimits) -> bool:
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
    found = (_parent_of(controller)[0] for controller in ("memory", "pids"))
    return list(dict.fromkeys(parent for parent in found if parent is not None))


def _parent_of(controller: str) -> tuple[Path | None, str]:
    """Return the group in which this process may limit `controller`, and the limit's file."""
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
    try:
        passed_on = (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return controller in passed_on and os.access(group / "cgroup.procs", os.W_OK)


def _own_groups() -> Iterator[tuple[int, list[str], str]]:
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

HOME = "/home/agent"

# Some programs expect `root`.
_FOLDERS = ("home/agent", "tmp", "var/tmp", "run", "opt", "etc", "root")

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

_ETC = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "hosts: files\n",
}

_READY = b"ready\n"
_START_S = 20.0

_NAMESPACES = ("--user", "--preserve-credentials", "--mount", "--pid", "--net", "--ipc", "--uts")

# See ioctl_ns(2).
_NS_GET_PARENT = 0xB702

# Listens in the sandbox's network namespace and passes the socket to the parent.
_LISTEN = """
import array, socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
sent = array.array("i", [listening.fileno()])
socket.socket(fileno=0).sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
"""

# After standard input closes, removes the folder and control groups in its arguments.
_SWEEP = """
cat > /dev/null
while [ -e "$0" ]; do chmod -R u+rwX "$0" 2> /dev/null; rm -rf "$0" 2> /dev/null || sleep 0.1; done
for names in "$@"; do for group in "$names"-*; do
    while [ -e "$group" ]; do rmdir "$group" 2> /dev/null || sleep 0.1; done
done; done
"""


NO_LIMITS = ResourceLimits()


class Bubblewrap:
    """Belongs to the event loop that starts it."""

    def __init__(self, limits: ResourceLimits = NO_LIMITS) -> None:
        for program, package in (("bwrap", "bubblewrap"), ("nsenter", "util-linux")):
            if shutil.which(program) is None:
                raise IsolationError(f"{program} is not installed; install it: apt-get install {package}")
        # `/` inside. Do not follow its links, which the sandbox's programs can make.
        self.root = Path(tempfile.mkdtemp(dir=_folder_of_this_process()))
        self._process: asyncio.subprocess.Process | None = None
        # A pidfd of the first process; all others end with it.
        self._init = -1
        self._init_pid = 0
        # The owning user namespace, through which this user may enter the others.
        self._owner = -1

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
        """Start, with the folders `readable` also mounted read-only.

        Files in `/work` and in folders outside the system survive a restart; the home folder and `/tmp` are
        new. Raises IsolationError with bwrap's message.
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
        """`cwd` is relative to `/work`. Raises IsolationError if the sandbox is not running."""
        variables = DEFAULT_ENVIRONMENT | dict(environment or {})
        # The first `env` hides this process's variables from `nsenter`.
        return [
            *("/usr/bin/env", "-i", *self._limited.outside, *self._entered(*_NAMESPACES)),
            # Otherwise the program could type into the terminal of the user's shell.
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
        """Listen on the sandbox's loopback interface; this process accepts."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *self._entered("--user", "--preserve-credentials", "--net"),
                *(sys.executable, "-I", "-S", "-c", _LISTEN, str(port)),
                stdin=theirs.fileno(),
                stderr=subprocess.PIPE,
                env={},
            )
            _, errors = await process.communicate()
            if process.returncode:
                raise IsolationError(
                    f"nothing can listen in the sandbox: {errors.decode(errors='replace').strip()}"
                )
            descriptors = array.array("i")
            _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(descriptors.itemsize))
        descriptors.frombytes(ancillary[0][2])
        return socket.socket(fileno=descriptors[0])

    async def stop(self) -> None:
        """End every process and keep the files."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # All have already ended.
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        os.close(self._init)
        os.close(self._owner)
        # bwrap waits for the first process, which the kernel ends last.
        await process.communicate()

    async def remove(self) -> None:
        await self.stop()
        await self._limited.remove()
        if self.root.exists():
            await asyncio.to_thread(_remove, self.root)

    def _lay_out(self) -> None:
        # Programs trust these folders, so no earlier files may stay.
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
        _, errors = await process.communicate()
        words = errors.decode(errors="replace").strip() or f"it did not start within {_START_S:g} s"
        raise IsolationError(f"bubblewrap cannot start a sandbox here: {words}")


DEFAULT_ENVIRONMENT = {
    "PATH": f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


def _owner_of(pid: int) -> int:
    # bwrap creates the namespaces as root of one user namespace and runs programs in a child of it.
    with open(f"/proc/{pid}/ns/user", "rb") as own:
        return fcntl.ioctl(own, _NS_GET_PARENT)


def _remove(path: Path) -> None:
    # Folders may have any mode, and links must not be followed.
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        subprocess.run(["chmod", "-R", "u+rwX", path], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(path)


def _bwrap(root: Path, readable: Iterable[Path], status: int) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--clearenv"]
    if os.geteuid() == 0:
        # Otherwise a program could become root in a user namespace. This also keeps other users from
        # entering, so only root uses it.
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
