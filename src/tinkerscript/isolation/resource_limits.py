"""`ResourceLimits` of a sandbox, and `LimitedProcesses`, which enforces them.

Memory and processes are counted by a control group (cgroups, version 1 or 2) where this process may make one
below its own, and otherwise by the limits that each process has (setrlimit).

Invariant: a limit that nothing enforces here is refused before anything runs.

Source: cgroups(7), https://docs.kernel.org/admin-guide/cgroup-v2.html, getrlimit(2)
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Iterator
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
