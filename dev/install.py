"""Install packages as `pip install` does, with uv where it can be had: what the Makefile calls.

uv takes a third of pip's time, but reads none of its settings, so they are passed on. pip installs if a
setting has no counterpart in uv, if uv cannot be installed, and if uv fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

UV = "uv==0.13.9"
OPTIONS = {
    "index-url": "--default-index",
    "constraint": "--constraint",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip, and the options of uv that take one of their values each."""
VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
"""Settings of pip, and the variables that uv reads."""
MEANINGLESS = {
    *("cache-dir", "default-timeout", "disable-pip-version-check", "no-cache-dir", "no-color", "no-compile"),
    *("no-input", "no-python-version-warning", "prefer-binary", "progress-bar", "quiet", "retries"),
    *("root-user-action", "timeout", "use-feature", "verbose"),
}
"""Settings of pip that do not change what is installed."""

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def settings(listed: str) -> dict[str, str]:
    """What `pip config list` printed, for `pip install`: the environment goes before files."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return found


def for_uv(found: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Options and variables that make uv do the same, or None if a setting has no counterpart in it."""
    if found.keys() - OPTIONS.keys() - VARIABLES.keys() - MEANINGLESS:
        return None
    # pip takes the best version of all indexes, and trusts what the system trusts.
    options = ["--index-strategy", "unsafe-best-match", "--system-certs"]
    for name, option in OPTIONS.items():
        for value in found.get(name, "").split():
            options += [option, value]
    return options, {VARIABLES[name]: value for name, value in found.items() if name in VARIABLES}


def installed_by_uv(python: str, arguments: Sequence[str]) -> bool:
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    passed = for_uv(settings(listed))
    if passed is None:
        return False
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists() and subprocess.run([*PIP, "install", "--quiet", "--no-compile", UV]).returncode:
        return False
    options, variables = passed
    command = [str(uv), "pip", "install", "--quiet", "--python", python, *options, *arguments]
    return subprocess.run(command, env=os.environ | variables).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--python", default=sys.executable, help="of the environment to install into")
    chosen, arguments = parser.parse_known_args()
    if installed_by_uv(chosen.python, arguments):
        return 0
    print("uv cannot install it here; pip does")
    return subprocess.run(
        [*PIP, "--python", chosen.python, "install", "--quiet", "--no-compile", *arguments]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
