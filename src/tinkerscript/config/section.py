"""`Section`: the base of every section of a config, which refuses unknown keys."""

from __future__ import annotations

import re

from pydantic import (
    BaseModel,
    ConfigDict,
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def http_url(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError("it must be a URL such as http://127.0.0.1:8000")
    return value
