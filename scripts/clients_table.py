"""Writes docs/clients.md from what the tests of the clients found. `make clients` runs both."""

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

A program that calls a model becomes a rollout by two changes: the base URL and the key of its
episode. This page says which clients were tried, with which features, and how each is pointed at an
episode. It is written by `scripts/clients_table.py` from `tests/clients/results.json`, which holds
what the tests found; `make acceptance` runs them and fails where it finds otherwise, `make clients`
records anew.

Each client's program runs in an interpreter of its own, with URL and key alone in its environment,
against a server process. Behind the server's link stands a model that spells its answers in tokens
which the tokenizer would not choose, so that any path through text gives other ids. Its log is the
oracle: after every feature each sampled token is in the episode once, with its log probability and
after the prompt it was sampled from; a conversation is one training sequence; the alignment report
is clean.
"""

FEATURES_TEXT = """\
## What works

**yes**: tried, and exact as above. –: the library or the API does not offer it, or another row
shows it.
"""

MEANINGS = """\
- *tools, several turns*: three questions, reasoning, two tools, two calls in one answer, arguments
  in spellings that no serialiser chooses, white space at the ends of answers, characters that are
  split between tokens.
- *malformed call*: a call whose JSON never closes stays text, and the conversation goes on from it.
- *call demanded*, *JSON schema*: `tool_choice` and `response_format`, or what the API has in their
  place; the sampler is given a grammar.
- *logprobs*: what the client was told equals what the sampler logged; with `return_token_ids` the
  ids too.
- *three at once*: three equal conversations of one episode, in parallel: three sequences.
- *retry after 503*: the library asks again by itself; nothing is recorded twice.
- *hang up amid a stream*: what was sampled for nobody is not recorded; the next request is answered.
"""

HABITS_TEXT = """\
## What clients send back

All of these were one sequence, whatever the client does with earlier answers. Found by: how the
session knew the call that a request goes on from, by an id of ours or by equal content (calls say
it as `matched_by`).
"""

REFUSED_TEXT = """\
## What is refused

By name, with status 400, before anything is sampled. Nothing is dropped in silence.
"""

SNIPPETS_TEXT = """\
## How to point a client at an episode

`episode` comes from `tinkerscript.client` (see [protocol.md](protocol.md)). These lines run in the
tests. Or set the variables that the library reads: `OPENAI_BASE_URL` and `OPENAI_API_KEY`;
`ANTHROPIC_BASE_URL` (without `/v1`) and `ANTHROPIC_API_KEY`; for Inspect's `openai-api/NAME/policy`
`NAME_BASE_URL` and `NAME_API_KEY`. A library that keeps one client for the whole process needs a
process, or a client, for each episode: a key opens one claim.
"""

NOTES = """\
## Notes

- Messages that `openai` streamed or parsed carry `parsed` and `parsed_arguments` when they are sent
  back. Both repeat what stands beside them and are read over.
- Anthropic's tool runner first asks for a thread that the server would keep. It is told
  `thread_unsupported_request` and sends the whole history instead, as its own code foresees: one
  request more for each runner.
- `pydantic-ai`'s `run_stream` takes the first text of an answer for the last, also where tool calls
  follow it; give `run` an `event_stream_handler` for an agent with tools.
- `openai-agents` sends traces to OpenAI unless it is told not to: `use_for_tracing=False`, or
  `OPENAI_AGENTS_DISABLE_TRACING=1`.
- `litellm` retries where `num_retries` is given.
- `verifiers` keeps `prompt_ids`, `completion_ids` and `completion_logprobs` of each step when it
  asks for logprobs and `return_token_ids`: there its records are the sampler's own, where the
  environments of the design document had zeros.
"""


def render() -> str:
    """The whole page."""
    rows: dict[str, dict[str, Any]] = json.loads((TESTS / "results.json").read_text())
    parts = [
        INTRODUCTION,
        FEATURES_TEXT,
        _table(["client", "API", *FEATURES.values()], [_features(each, rows[each.key]) for each in CLIENTS]),
        MEANINGS,
        HABITS_TEXT,
        _table(
            ["client", "version", "API", "reasoning", "found by", "fields it adds"],
            [_habits(each, rows[each.key]) for each in CLIENTS],
        ),
        SNIPPETS_TEXT,
        *(_snippet(each, rows[each.key]["version"]) for each in CLIENTS if each.snippet),
        REFUSED_TEXT,
        _table(
            ["API", "asked for", "answer"],
            [
                [APIS[each.api], asked, _cell(message)]
                for each in CLIENTS
                for asked, message in rows[each.key].get("refused", {}).items()
            ],
        ),
        NOTES,
    ]
    return "\n".join(parts)


def _snippet(client: Client, version: str) -> str:
    return f"{client.name} {version}, {APIS[client.api]}:\n\n```python\n{client.snippet}```\n"


def _features(client: Client, row: dict[str, Any]) -> list[str]:
    found = ["yes" if feature in row["works"] else "–" for feature in FEATURES]
    return [client.name, APIS[client.api], *found]


def _habits(client: Client, row: dict[str, Any]) -> list[str]:
    added = ", ".join(f"`{name}`" for name in row["sends"])
    return [
        client.name,
        row["version"],
        APIS[client.api],
        row["reasoning"],
        ", ".join(row["matched_by"]),
        added or "none",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    TARGET.write_text(render())


if __name__ == "__main__":
    main()
