"""The `tinkerscript` command, also as `python -m tinkerscript`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line; without its packages, say what to install."""
    try:
        cli = importlib.import_module("tinkerscript.cli")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'tinkerscript[server]'")
    cli.app()


if __name__ == "__main__":
    main()
