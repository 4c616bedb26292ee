"""Export a run as one HTML file: the page's code and the replies it requests.

Its content-security policy admits only that script, and no other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page import curves as curve_view
from tinkerscript.page.curves import alignment_view, found_in
from tinkerscript.page.episode_view import EpisodeView, episode_view
from tinkerscript.page.held_out import ComparisonQuery, compare, sample_view
from tinkerscript.page.lines import newest
from tinkerscript.page.overview import evaluations, overview, run_line
from tinkerscript.page.steps import StepLine, step_page, step_view
from tinkerscript.page.token_view import token_view

PAGE_FILES = Path(__file__).parent / "static"
TOKENS_PER_REPLY = 2048  # As in `tokens.js`.

EXPORTED_TOKENS = 20_000  # Per sequence.

CURVE_POINTS = 300
MAX_STEP_LINES = 10_000

_IMPORT = re.compile(r'^import (\{[^}]*\}|\w+) from "([^"]+)";$', re.MULTILINE)
_EXPORTED = re.compile(r"^export (?=(async )?(function|const|class) )", re.MULTILINE)


def export_run(name: str, ledger: LedgerReader, *, steps: int = 20, episodes: int = 300) -> str:
    """Includes `steps` evenly spaced steps with groups, and up to `episodes` conversations with tokens."""
    replies = {path: _plain(reply) for path, reply in _replies(name, ledger, steps, episodes)}
    return _html(f"{name} · TinkerScript", _bundle(), to_json(replies, inf_nan_mode="null").decode())


def _plain(reply: Any) -> Any:
    if isinstance(reply, BaseModel):
        return reply.model_dump(mode="json")
    return [_plain(item) for item in reply] if isinstance(reply, list) else reply  # pyright: ignore[reportUnknownVariableType]


def _replies(name: str, ledger: LedgerReader, steps: int, episodes: int) -> Iterator[tuple[str, Any]]:
    run = f"runs/{name}"
    yield "runs", {"runs": [run_line(name, ledger)], "version": ""}
    yield run, overview(name, ledger)
    yield f"{run}/config", ledger.config
    metrics = curve_view.metrics(ledger)
    yield f"{run}/metrics", metrics
    yield f"{run}/curves", curve_view.curves(ledger, [m.name for m in metrics], points=CURVE_POINTS)
    lines = _step_lines(ledger)
    yield f"{run}/steps", {"steps": lines, "next": None}
    yield f"{run}/evaluations", evaluations(ledger)
    wanted: dict[str, None] = {}
    samples: dict[str, None] = {}
    if evaluations(ledger):
        comparison = compare(ledger, ComparisonQuery())
        yield f"{run}/comparison", comparison
        for change in comparison.samples:
            samples[change.sample] = None
            wanted |= dict.fromkeys(uuid for uuid in (change.after_uuid, change.before_uuid) if uuid)
    for step in _spaced([line.step for line in lines], steps):
        view = step_view(ledger, step)
        yield f"{run}/steps/{step}", view
        for group in view.groups:
            if group.sample is not None:
                samples[group.sample] = None
        wanted |= dict.fromkeys(episode.uuid for group in view.groups for episode in group.episodes)
    latest = newest(ledger, limit=50)
    yield f"{run}/episodes", {"episodes": latest.episodes, "next": None}
    wanted = dict.fromkeys([line.uuid for line in latest.episodes[:12]]) | wanted
    alignment = alignment_view(ledger)
    yield f"{run}/alignment", alignment
    for kind in alignment.kinds:
        yield f"{run}/alignment/{kind.kind}/{kind.name}", found_in(ledger, kind.kind, kind.name)
    for digest in list(samples)[:episodes]:
        yield f"{run}/samples/{digest}", sample_view(ledger, digest)
    for uuid in _spaced(list(wanted), episodes):
        episode = episode_view(name, ledger, uuid)
        yield f"episodes/{uuid}", episode
        yield from _token_replies(ledger, episode)


def _token_replies(ledger: LedgerReader, episode: EpisodeView) -> Iterator[tuple[str, Any]]:
    uuid = episode.line.uuid
    for sequence in episode.sequences:
        for start in range(0, min(sequence.tokens, EXPORTED_TOKENS), TOKENS_PER_REPLY):
            end = min(sequence.tokens, start + TOKENS_PER_REPLY)
            query = f"sequence={sequence.number}&start={start}&end={end}"
            yield (
                f"episodes/{uuid}/tokens?{query}",
                token_view(ledger, uuid, sequence.number, start=start, end=end),
            )


def _step_lines(ledger: LedgerReader) -> list[StepLine]:
    lines: list[StepLine] = []
    before: int | None = None
    while len(lines) < MAX_STEP_LINES:
        page = step_page(ledger, before=before, limit=200)
        lines += page.steps
        if page.next is None:
            break
        before = page.next
    return lines


def _spaced(items: list[Any], number: int) -> list[Any]:
    if len(items) <= number:
        return items
    last = len(items) - 1
    return [items[round(at * last / max(1, number - 1))] for at in range(number)]


def _bundle() -> str:
    order: list[str] = []
    _visit("app.js", order)
    parts = [f"const {_variable(name)} = (() => {{\n{_function(name)}\n}})();" for name in order]
    return '"use strict";\n' + "\n".join(parts)


def _visit(name: str, order: list[str]) -> None:
    if name in order:
        return
    for match in _IMPORT.finditer((PAGE_FILES / name).read_text(encoding="utf-8")):
        _visit(match[2].removeprefix("./"), order)
    order.append(name)


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _function(name: str) -> str:
    """Rewrite a module as a function body, from imports to exports."""
    text = (PAGE_FILES / name).read_text(encoding="utf-8")
    names = re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", text, re.MULTILINE)
    renamed: dict[str, str] = {}
    if found := re.search(r"export\s*\{([^}]*)\};?\s*$", text):  # Minified Preact.
        pairs = [pair.split(" as ") for pair in found[1].split(",")]
        renamed = {pair[-1]: pair[0] for pair in pairs}
        text = text[: found.start()]
    if found := re.search(r"^export default (\w+);\s*$", text, re.MULTILINE):
        renamed["default"] = found[1]
        text = text[: found.start()]
    text = _IMPORT.sub(_taken, text)
    text = _EXPORTED.sub("", text)
    returned = [*(f"{outer}: {inner}" for outer, inner in renamed.items()), *names]
    return f"{text}\nreturn {{ {', '.join(returned)} }};"


def _taken(match: re.Match[str]) -> str:
    source = _variable(match[2].removeprefix("./"))
    if match[1].startswith("{"):
        return f"const {match[1].replace(' as ', ': ')} = {source};"
    return f"const {match[1]} = {source}.default;"


def _html(title: str, script: str, replies: str) -> str:
    script = script.replace("</script", "<\\/script")
    styles = "\n".join(
        (PAGE_FILES / name).read_text(encoding="utf-8") for name in ("vendor/uplot.css", "style.css")
    )
    icon = base64.b64encode((PAGE_FILES / "icon.svg").read_bytes()).decode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = replies.replace("<", "\\u003c")  # No text can end the script element.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title, quote=False)}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{styles}</style>
</head>
<body>
<div id="page"></div>
<script type="application/json" id="replies">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
