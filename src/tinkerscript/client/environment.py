"""What the environment says about the server: its URL and the client's token.

TINKERSCRIPT_SERVER_URL, and TINKERSCRIPT_CLIENT_TOKEN or TINKERSCRIPT_CLIENT_TOKEN_FILE: the path of a file
that holds the token, such as a mounted secret. The token itself wins. Tokens are never logged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SERVER_URL = "TINKERSCRIPT_SERVER_URL"
TOKEN = "TINKERSCRIPT_CLIENT_TOKEN"
TOKEN_FILE = "TINKERSCRIPT_CLIENT_TOKEN_FILE"

DEFAULT_SERVER_URL = "http://127.0.0.1:10086"


def server_url(environ: Mapping[str, str] = os.environ) -> str:
    """The server's URL."""
    return environ.get(SERVER_URL) or DEFAULT_SERVER_URL


def client_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The client's token; None if the environment names none.

    Raises ValueError for a token file that cannot be read, or is empty.
    """
    path = environ.get(TOKEN_FILE)
    if (token := environ.get(TOKEN)) or not path:
        return token or None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{TOKEN_FILE}: cannot read {path}: {error}") from error
    if not token:
        raise ValueError(f"{TOKEN_FILE}: {path} is empty; write the server's client token into it")
    return token
