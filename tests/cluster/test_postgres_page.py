"""What the page says of a run is the same whether its ledger is in SQLite or in PostgreSQL."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import httpx
import pytest
from pydantic_core import to_json

from made_run import MadeRun
from postgres_server import PostgresServer, running_postgres
from run_ledger import LedgerWriter, ask, rows
from short_runs import short_run
from tinkerscript.config import load_config
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.health import best_score, health_rows
from tinkerscript.ledger.postgres import PostgresLedger
from tinkerscript.ledger.reader import STORE_VARIABLE, LedgerReader
from tinkerscript.ledger.rows import TABLES, UNDONE, EpisodeRow, FindingRow, ResumptionRow
from tinkerscript.page import lines
from tinkerscript.page.curves import alignment_view, curves, found_in, metrics
from tinkerscript.page.episode_view import episode_view, find_episode
from tinkerscript.page.held_out import ComparisonQuery, compare, sample_view
from tinkerscript.page.lines import Show, newest, search
from tinkerscript.page.overview import evaluations, overview, run_line
from tinkerscript.page.steps import GroupFilter, step_page, step_view
from tinkerscript.page.token_view import token_view
from tinkerscript.page.transcript_view import transcript_view
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

SEARCHES = (
    *("what 12", '"the shop\'s sandbox"', "reward>0.5", "step=2", "step>=1 what"),
    *("score/solved=0 calls=2", "undone=1", "label:after", "queued_s>=0", "type!=train", "nothing-such"),
    "status:failed",
)


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


def resumed_run(folder: Path) -> Path:
    """A run of a few steps whose last one is undone, with failures, evaluations, findings and transcripts."""
    size = {"steps": 5, "groups": 4, "group_size": 4, "evaluation_every": 2, "evaluation_samples": 6}
    run = MadeRun(folder / "run", texts=["What is \0\x01?", "12"], **size).write()  # type: ignore[arg-type]
    ((uuid,),) = ask(run, "SELECT uuid FROM episodes WHERE end_number = 50")
    findings = [FindingRow(step=2, kind="error", name=name, episode=uuid) for name in ("second", "first")]
    with LedgerWriter(run) as writer:
        writer.put(*findings, FindingRow(step=3, kind="finding", name="ratio", detail="too far"))
        writer.put(ResumptionRow(resumption=1, time=1.0, step=4))
        writer.status(step=4)
        for kind in (EpisodeRow, *UNDONE):
            writer.execute(f"UPDATE {kind.TABLE} SET undone = 1 WHERE step > 4")
    return run


async def copied(run: Path, target: Path, url: str) -> Path:
    """The run's folder without its ledger, whose rows are in PostgreSQL."""
    there = target / run.name
    shutil.copytree(run, there, ignore=shutil.ignore_patterns(f"{LEDGER_FILE}*", "link.ipc"))
    config = (there / "config.yaml").read_text().replace("store: sqlite", f"store: {url}")
    (there / "config.yaml").write_text(config)
    assert load_config(there / "config.yaml").interchange_server.store == url
    ledger = PostgresLedger(url, there)
    await ledger.lead()
    for kind in TABLES:
        order = ", ".join(kind.KEY) or "number"
        await ledger.commit(rows(run, kind, f"ORDER BY {order}"))
    await ledger.close()
    return there


class Answers:
    """What the page answers about one run."""

    def __init__(self, run: Path, ledger: LedgerReader) -> None:
        """`run`: with the ledger in SQLite, for the names of what is there."""
        self._ledger = ledger
        self._episodes = [uuid for (uuid,) in ask(run, "SELECT uuid FROM episodes ORDER BY sequence")]
        self._samples = [digest.hex() for (digest,) in ask(run, "SELECT digest FROM samples ORDER BY 1")]

    def all(self) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, answer in self._answers():
            text = to_json(answer, inf_nan_mode="null").decode()
            # Sums of floats depend on their order.
            found[name] = json.loads(text, parse_float=lambda value: f"{float(value):.9g}")
        return found

    def _answers(self) -> Iterator[tuple[str, Any]]:
        ledger = self._ledger
        yield "overview", overview("run", ledger).model_copy(update={"folder": ""})
        yield "line", run_line("run", ledger)
        yield "health", [health_rows(ledger), best_score(ledger)]
        yield "steps", [step_page(ledger), step_page(ledger, before=4, limit=2)]
        for step in range(1, 5):
            yield f"step {step}", [step_view(ledger, step, show=show) for show in get_args(GroupFilter)]
        yield "episodes", [newest(ledger, show=show) for show in get_args(Show)]
        yield "older episodes", [newest(ledger, before=number, limit=7) for number in (1, 40, 90)]
        for text in SEARCHES:
            yield f"search {text}", [search(ledger, text), search(ledger, text, before=40, limit=3)]
        yield "evaluations", evaluations(ledger)
        shows = ("all", "better", "worse", "same")
        yield "comparison", [compare(ledger, ComparisonQuery(show=show)) for show in shows]
        for digest in self._samples:
            yield f"sample {digest}", [sample_view(ledger, digest), sample_view(ledger, digest, limit=3)]
        for uuid in self._episodes:
            yield f"episode {uuid}", self._answers_about(uuid)
        view = alignment_view(ledger)
        yield "alignment", [view, [found_in(ledger, kind.kind, kind.name) for kind in view.kinds]]
        every = metrics(ledger)
        yield "metrics", every
        yield "curves", [curves(ledger, [each.name for each in every], points=points) for points in (2, 400)]

    def _answers_about(self, uuid: str) -> list[Any]:
        ledger = self._ledger
        view = episode_view("run", ledger, uuid)
        asked = [
            lambda: find_episode(ledger, uuid[:12]),
            lambda: transcript_view(ledger, uuid),
            *(lambda at=at: token_view(ledger, uuid, at) for at in range(len(view.sequences) + 1)),
            lambda: token_view(ledger, uuid, 0, start=2, end=5, step=2),
        ]
        found: list[Any] = [view]
        for ask_one in asked:
            try:
                found.append(ask_one())
            except NotRecordedError as error:
                found.append(str(error))
        return found


async def test_the_page_says_the_same_of_a_run_in_either_database(
    tmp_path: Path, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A search that runs out of time says where to go on, and that is elsewhere in each database.
    monkeypatch.setattr(lines, "SCAN_S", 600.0)
    run, url = resumed_run(tmp_path), f"{database.url}?schema=read_{uuid4().hex[:8]}"
    there = await copied(run, tmp_path / "there", url)
    with pytest.raises(ConfigError, match=f"if it is yours, set {STORE_VARIABLE} to the run's"):
        LedgerReader(there)
    monkeypatch.setenv(STORE_VARIABLE, url)
    in_file, in_database = (Answers(run, LedgerReader(folder)).all() for folder in (run, there))
    # It is not the same because nothing is there.
    view = in_file["overview"]
    assert (view["step"], len(view["evaluations"])) == (4, 3)
    assert view["health"]["failures"]
    assert all(in_file[f"search {text}"][0]["episodes"] for text in SEARCHES if text != "nothing-such")
    assert len(in_file["alignment"][1]) == 4
    assert in_database.keys() == in_file.keys()
    for name, answer in in_file.items():
        assert in_database[name] == answer, name


class Visitor(QuietReporter):
    """Asks the run's page after each step."""

    page = ""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def found(self, url: str) -> None:
        self.page = url

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        reply = httpx.get(f"{self.page}/api/runs/run/steps", timeout=60)
        assert reply.status_code == 200, reply.text
        self.seen.append(reply.json()["steps"][0]["step"])


async def test_the_page_of_a_run_reads_its_database(
    tmp_path: Path, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = short_run(
        tmp_path / "run",
        interchange_server={"store": f"{database.url}?schema=visited"},
        training={"steps": 2, "groups_per_step": 2, "group_size": 2},
    )
    visitor = Visitor()
    await run_training(config, visitor, on_page=visitor.found)
    assert visitor.seen == [1, 2]
