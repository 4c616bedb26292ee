"""`python -m tinkerscript.server --run-dir DIR`: the interchange server of one run folder.

Reads DIR/config.yaml, restores DIR/server.sqlite, writes DIR/server.json when it listens. Exit codes: 0 after
SIGTERM, SIGINT or the parent's end; 2 for what the user can put right; 1 for anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

import uvicorn

from tinkerscript.config import load_config
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.server.process import serve_until_stopped


def main(arguments: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tinkerscript.server", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input ends")
    parser.add_argument(
        "--serve-model", action="store_true", help="serve the model itself: the client token is its API key"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # It logs every request.
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    loop_factory = uvicorn.Config("").get_loop_factory()
    try:
        config = load_config(options.run_dir / "config.yaml")
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(
                serve_until_stopped(
                    config,
                    options.run_dir,
                    environ=os.environ,
                    exit_with_parent=options.exit_with_parent,
                    serve_model=options.serve_model,
                )
            )
    except (ConfigError, StoreError) as error:
        print(f"tinkerscript server: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
