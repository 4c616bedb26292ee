"""The gateway's wire formats. To add one, write its `Dialect` and add it to `DIALECTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.gateway.dialects.anthropic import AnthropicMessages
from tinkerscript.gateway.dialects.chat import ChatCompletions
from tinkerscript.gateway.dialects.completions import Completions
from tinkerscript.gateway.dialects.dialect import Dialect
from tinkerscript.gateway.dialects.openai import OpenAIDialect
from tinkerscript.gateway.dialects.responses import Responses

__all__ = [
    "DIALECTS",
    "REFUSAL_BODIES",
    "AnthropicMessages",
    "ChatCompletions",
    "Completions",
    "Responses",
]

DIALECTS: tuple[type[Dialect[Any]], ...] = (ChatCompletions, Completions, Responses, AnthropicMessages)

REFUSAL_BODIES: Mapping[str, Callable[[int, str], dict[str, Any]]] = {
    **{
        prefix + dialect.path: dialect.error_body
        for dialect in sorted(DIALECTS, key=lambda each: -len(each.path))
        for prefix in ("", AGENT_PREFIX)
    },
    "/v1/": OpenAIDialect.error_body,
    f"{AGENT_PREFIX}/v1/": OpenAIDialect.error_body,
}
"""By path prefix, longest first."""
