"""The search: what it finds, and its index, which is made while people search."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard

from tinkerscript.errors import NotRecordedError
from tinkerscript.page import lines, search_index
from tinkerscript.page.lines import newest, search
from tinkerscript.page.search_index import SEARCH_FILE, SearchIndex
from written_run import WrittenRun, call_row, said


def found(run: WrittenRun, text: str) -> list[str]:
    return [each.uuid for each in search(run.reader, text).episodes]


def test_the_search_finds_words_ids_and_conditions(run: WrittenRun) -> None:
    def one(uuid: str, answer: str, reward: float, **more: Any) -> None:
        scores = {"scores": {"exact": reward >= 1}}
        run.episode(uuid, [said(None, [1], [2], "Question?", answer)], reward=reward, metadata=scores, **more)

    one("7f3a-1", "I am sorry, I cannot.", 0.0, client="worker-3")
    one("7f3b-2", "The answer is: four", 1.0, step=12, queued_s=90.0)
    one("88", "is the answer four?", 0.5, log_metrics={"turns": 4.0})
    run.episode("99", reward=None, task="riddles")
    run.trained(1, "88", advantage=-0.25)
    assert found(run, "sorry cannot") == ["7f3a-1"]
    assert found(run, "sorry four") == []
    assert found(run, "SORR") == ["7f3a-1"], "a word by its beginning"
    assert found(run, "answer four") == ["88", "7f3b-2"]
    assert found(run, '"the answer is"') == ["7f3b-2"]
    assert found(run, "7f3") == found(run, "uuid:7f3") == ["7f3b-2", "7f3a-1"]
    assert found(run, "worker-3") == ["7f3a-1"]
    assert found(run, "riddles late") == ["99"], "a failed one by its task, and why"
    assert found(run, "client!=worker-3") == ["99", "88", "7f3b-2"]
    assert found(run, "reward>0") == ["88", "7f3b-2"]
    assert found(run, "four step=12") == ["7f3b-2"]
    assert found(run, "step<12 type:train label!=after attempt=1") == ["99", "88", "7f3a-1"]
    assert found(run, "calls>0 sampled_tokens<2") == ["88", "7f3b-2", "7f3a-1"]
    assert found(run, "score/exact>=1 four") == ["7f3b-2"]
    assert found(run, "turns=4") == ["88"]
    assert found(run, "queued_s>60") == ["7f3b-2"]
    assert found(run, "advantage<0") == ["88"]
    assert found(run, "outcome:trained") == ["88"]
    assert found(run, "status=failed") == ["99"]
    assert found(run, "") == ["99", "88", "7f3b-2", "7f3a-1"]
    assert found(run, 'sorry" OR "four') == []
    for strange in ("*", '"', "a AND", "NEAR(", "body:sorry", "-", "é😀"):
        assert found(run, strange) == [], strange
    for unreadable in ("\x00", "sample:x"):
        with pytest.raises(NotRecordedError, match=r"cannot be used|not the beginning of a sample's digest"):
            found(run, unreadable)


def test_a_filter_goes_through_a_long_run_in_spans(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SPAN", 3)
    monkeypatch.setattr(lines, "SCAN_S", -1.0)
    for number in range(1, 9):
        run.episode(f"e{number}", reward=float(number == 2))
    pages, before = list[tuple[list[str], int | None]](), None
    while not pages or before is not None:
        page = search(run.reader, "reward>0.5", before=before)
        pages.append(([each.uuid for each in page.episodes], before := page.next))
    assert pages == [([], 6), ([], 3), (["e2"], 2), ([], None)]


# The index


def spans(folder: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(folder / SEARCH_FILE)) as index:
        return index.execute("SELECT first, last FROM spans ORDER BY first").fetchall()


def test_it_is_made_from_the_newest_down_and_each_page_goes_on(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that indexes two episodes, and is handed out at once."""
    ticks = count()
    monkeypatch.setattr(search_index, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.2))
    monkeypatch.setattr(search_index, "CHUNK", 2)
    monkeypatch.setattr(lines, "SCAN_S", -1.0)
    for number in range(1, 8):
        run.episode(f"e{number}", [said(None, [1], [2], "q", "rare" if number == 1 else "often")])
    pages, before = list[list[str]](), None
    while not pages or before is not None:
        page = search(run.reader, "rare", before=before)
        pages.append([each.uuid for each in page.episodes])
        before = page.next
    assert pages == [[], [], [], ["e1"], []]
    assert spans(run.folder) == [(1, 7)]
    run.episode("e8")
    assert found(run, "reply") == ["e8"]
    assert spans(run.folder) == [(1, 8)]


def test_several_pages_make_it_at_once(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_index, "CHUNK", 3)
    for number in range(1, 41):
        run.episode(f"e{number}")
    begin = threading.Barrier(4)
    answers: list[list[int]] = []

    def look(first: int) -> None:
        index = SearchIndex(run.reader)
        begin.wait()
        last = 40
        while last >= first:
            last = index.extend(first, last) - 1
        answers.append(index.find(["reply"], first, 40, 100))

    pages = [threading.Thread(target=look, args=(first,)) for first in (1, 1, 1, 20)]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert sorted(answers, key=len) == [list(range(40, 19, -1)), *[list(range(40, 0, -1))] * 3]
    assert spans(run.folder) == [(1, 40)]


# Where it cannot be


def a_link(folder: Path, target: Path) -> None:
    (folder / SEARCH_FILE).symlink_to(target)


def a_link_beside_it(folder: Path, target: Path) -> None:
    with closing(sqlite3.connect(folder / SEARCH_FILE)) as index:
        index.execute("PRAGMA journal_mode = WAL")
    (folder / f"{SEARCH_FILE}-wal").symlink_to(target)


def no_database(folder: Path, target: Path) -> None:
    (folder / SEARCH_FILE).write_bytes(b"no database" * 100)


def another_database(folder: Path, target: Path) -> None:
    with closing(sqlite3.connect(folder / SEARCH_FILE)) as index:
        index.execute("CREATE TABLE words (body)")
        index.execute("CREATE VIEW spans AS SELECT 1 AS first, 9 AS last")


def a_folder(folder: Path, target: Path) -> None:
    (folder / SEARCH_FILE).mkdir()


@pytest.mark.parametrize("put", [a_link, a_link_beside_it, no_database, another_database, a_folder])
def test_what_a_folder_from_elsewhere_has_in_its_place_is_left_alone(
    run: WrittenRun, tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    put(run.folder, target)
    run.episode("e")
    assert found(run, "reply") == ["e"]
    assert target.read_text() == "mine"


def test_a_folder_that_is_read_only_is_searched(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.episode("e")
    run.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    monkeypatch.setattr("os.access", Mock(return_value=False))
    assert found(run, "reply") == ["e"]
    assert not (run.folder / SEARCH_FILE).exists()


BROKEN = [
    zstandard.ZstdCompressor().compress(b"\0" * 10**6),
    b"garbage",
    call_row(1, 1, said(None, [1], [2], "q", "a", reply="no JSON")).call,
]


@pytest.mark.parametrize("call", BROKEN)
def test_an_episode_that_cannot_be_read_hides_no_other(run: WrittenRun, call: bytes) -> None:
    for uuid in ("e1", "e2", "e3"):
        run.episode(uuid)
    run.execute("UPDATE calls SET call = ? WHERE episode = 2", call)
    assert found(run, "e2") == ["e2"]
    assert found(run, "reply") == ["e3", "e1"]
    assert [each.preview for each in newest(run.reader).episodes] == ["reply e3", "", "reply e1"]
