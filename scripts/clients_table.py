"""Write docs/clients.md from tests/clients/results.json.

The client tests record that file: `CLIENTS_RECORD=1 .venv-tests/bin/python -m pytest tests/clients`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "clients.md"
TESTS = ROOT / "tests" / "clients"

sys.path.insert(0, str(TESTS))

from roster import APIS, CLIENTS, FEATURES, Client  # noqa: E402

INTRODUCTION = """\
# Clients

To turn a program that calls a model into a rollout, give it the episode's base URL and API key.
`make acceptance` runs every client and fails if a result differs from this page.
"""

FEATURES_TEXT = """\
## What works

**yes**: tested, and token-exact. –: the library or the API lacks it, or another row covers it.
"""

MEANINGS = """\
- *tools, several turns*: three questions, reasoning, two tools, two calls in one reply, unusually spelled
  arguments, trailing white space, characters split across tokens.
- *malformed call*: a tool call with unclosed JSON stays text, and the conversation continues.
- *required call*, *JSON schema*: `tool_choice` and `response_format`, or the API's equivalents, under a
  grammar.
- *logprobs*: the client received the sampler's logprobs; with `return_token_ids`, also the ids.
- *three at once*: three identical conversations in one episode, in parallel, give three sequences.
- *retry after 503*: the library retries by itself, and nothing is recorded twice.
- *disconnect mid-stream*: an abandoned reply is not recorded, and the next request is answered.

Each client runs against a real server. The model spells its replies in tokens that the tokenizer would not
produce, so any detour through text would change the ids. After every feature, each sampled token is in the
episode exactly once, with its logprob and after its own prompt; the conversation is one training sequence,
and the alignment report is clean.
"""

REFUSED_TEXT = """\
## Refused requests

An unsupported field gets [status 400](protocol.md#post-v1responses-and-post-v1messages) before anything is
sampled, with a message that names it. With a model that takes no [images](models.md#images), we tested:
"""

SNIPPETS_TEXT = """\
## How to point a client at an episode

`episode` comes from `tinkerscript.client` ([Start](start.md#your-own-agent)). Or set the library's variables:
`OPENAI_BASE_URL` and `OPENAI_API_KEY`; `ANTHROPIC_BASE_URL` (without `/v1`) and `ANTHROPIC_API_KEY`; for
Inspect's `openai-api/NAME/policy`, `NAME_BASE_URL` and `NAME_API_KEY`.

A key is valid for one claim, so make a new client, or a new process, for each episode.
"""

NOTES = """\
## Notes

- Anthropic's tool runner sends one extra request: it asks for a server-side thread, gets
  `thread_unsupported_request`, and sends the whole history instead.
- `run_stream` in `pydantic-ai` takes the first text of a reply as the final one, even if tool calls follow.
  For an agent with tools, give `run` an `event_stream_handler`.
- `openai-agents` sends traces to OpenAI unless you pass `use_for_tracing=False` or set
  `OPENAI_AGENTS_DISABLE_TRACING=1`.
- `litellm` retries only if `num_retries` is given.
"""


def render() -> str:
    """The whole page."""
    rows: dict[str, dict[str, Any]] = json.loads((TESTS / "results.json").read_text())
    parts = [
        INTRODUCTION,
        SNIPPETS_TEXT,
        *(_snippet(each) for each in CLIENTS if each.snippet),
        FEATURES_TEXT,
        _table(["client", "API", *FEATURES.values()], [_features(each, rows[each.key]) for each in CLIENTS]),
        MEANINGS,
        REFUSED_TEXT,
        _table(
            ["API", "refused"],
            [
                [APIS[each.api], "; ".join(refused)]
                for each in CLIENTS
                if (refused := rows[each.key].get("refused"))
            ],
        ),
        NOTES,
    ]
    return "\n".join(parts)


def _snippet(client: Client) -> str:
    return f"### {client.name}, {APIS[client.api]}\n\n```python\n{client.snippet}```\n"


def _features(client: Client, row: dict[str, Any]) -> list[str]:
    found = ["yes" if feature in row["works"] else "–" for feature in FEATURES]
    return [f"{client.name} {row['version']}", APIS[client.api], *found]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    TARGET.write_text(render())


if __name__ == "__main__":
    main()
