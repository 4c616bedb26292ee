"""Renderers by name, those of older documents included.

Invariant: importing this module makes `tinker_cookbook.renderers.get_renderer` know the older names too, so
that a program which uses one runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import (
    Renderer,
    get_registered_renderer_names,
    get_renderer,
    is_renderer_registered,
    register_renderer,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_bridge.errors import EnvironmentConfigError

OLD_NAMES = {"LlamaRenderer": "llama3", "QwenRenderer": "qwen3"}
"""Name in older documents -> tinker_cookbook's name of today."""


def renderer_names() -> list[str]:
    """Names that tinker_cookbook's `get_renderer` knows (as it documents them) and registered ones."""
    documented = re.findall(r'^\s*- ``"(\w+)"``', get_renderer.__doc__ or "", flags=re.MULTILINE)
    return sorted({*documented, *get_registered_renderer_names()})


def make_renderer(renderer: Renderer | str, tokenizer: Tokenizer | None) -> Renderer:
    """The renderer itself, or the one of that name. Raises EnvironmentConfigError naming those that exist."""
    if isinstance(renderer, Renderer):
        if tokenizer is not None:
            raise EnvironmentConfigError("a Renderer has its own tokenizer: give no `tokenizer` beside it")
        return renderer
    names = renderer_names()
    if renderer not in names:
        raise EnvironmentConfigError(f"no renderer is called {renderer!r}. Known: {', '.join(names)}")
    if tokenizer is None:
        raise EnvironmentConfigError(
            f"the renderer {renderer!r} needs a tokenizer: pass tokenizer=get_tokenizer(model_name), "
            "or the Renderer itself"
        )
    try:
        return get_renderer(renderer, tokenizer)
    except RendererError as error:
        raise EnvironmentConfigError(f"the renderer {renderer!r} cannot be made: {error}") from error


def _alias(name: str) -> Callable[[Tokenizer, Any], Renderer]:
    def make(tokenizer: Tokenizer, image_processor: Any = None) -> Renderer:
        return get_renderer(name, tokenizer, image_processor)

    return make


for _old, _name in OLD_NAMES.items():
    if not is_renderer_registered(_old):
        register_renderer(_old, _alias(_name))
