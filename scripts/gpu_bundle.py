"""What `bench/gpu.py` needs beside torch, transformers and PEFT, for a machine without a network.

    python scripts/gpu_bundle.py gpu-bundle.tar.xz [--python-version 3.12]

There: `tar xf gpu-bundle.tar.xz && cd gpu-bundle && PYTHONPATH=site python3 bench/gpu.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("server", "inspect", "engine")
THERE = ("torch", "transformers", "peft")
"""What the machine has, with all that they need."""

CARRIED = ("pydantic",)
"""What those need only in some versions: the machine's may be older."""

UNUSED = {"debugpy", "lxml", "pandas", "pyarrow", "pycryptodomex", "pyqwest", "tml-renderers"}
"""Large packages that nothing in the programs imports."""

UNUSED_FILES = ("inspect_ai/_view/dist", "inspect_ai/binaries", "botocore/data")
LIMIT_MIB = 60


def needs(requirements: Iterable[str]) -> set[str]:
    """The names of the installed packages that `requirements` need, their own among them."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            inner = distribution(name).requires or ()
        except PackageNotFoundError:  # Of another platform.
            continue
        new = {*requirement.extras, ""} - found.setdefault(name, set())
        found[name] |= new
        for each in map(Requirement, inner):
            if new and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in new)):
                waiting.append(each)
    return set(found)


def install(site: Path, version: str) -> None:
    """Into `site`, what is missing there, for Linux and the Python of `version`, as it is installed here."""
    missing = needs([f"tinkerscript[{','.join(EXTRAS)}]"]) - needs(THERE) | needs(CARRIED)
    missing -= UNUSED | {"tinkerscript", *needs(["torch"])}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    pip += ["--no-compile", "--target", str(site)]
    subprocess.run([*pip, str(ROOT)], check=True)
    pip += ["--only-binary", ":all:", "--python-version", version, "--platform", "manylinux2014_x86_64"]
    for minor in range(39, 4, -1):
        pip += ["--platform", f"manylinux_2_{minor}_x86_64"]
    subprocess.run([*pip, *(f"{each}=={distribution(each).version}" for each in sorted(missing))], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--python-version", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    given = parser.parse_args()

    def kept(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
        dropped = "__pycache__" in file.name or any(f"site/{each}" in file.name for each in UNUSED_FILES)
        return None if dropped else file

    with tempfile.TemporaryDirectory() as name, tarfile.open(given.archive, "w:xz", preset=6) as archive:
        install(Path(name), given.python_version)
        archive.add(name, "gpu-bundle/site", filter=kept)
        for folder in ("bench", "examples"):
            archive.add(ROOT / folder, f"gpu-bundle/{folder}", filter=kept)
    size = given.archive.stat().st_size / 2**20
    print(f"{given.archive}: {size:.0f} MiB, for Python {given.python_version} with {', '.join(THERE)}")
    if size > LIMIT_MIB:
        raise SystemExit(f"more than {LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
