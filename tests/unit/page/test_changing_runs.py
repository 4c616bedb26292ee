"""What people write about a run, and the deletion of a run, through the page's API."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from page_client import page
from tinkerscript.files import LEDGER_FILE
from tinkerscript.lifecycle import ProcessId, try_lock
from tinkerscript.page.access import AUDIT_FILE
from tinkerscript.page.annotation import ANNOTATION_FILE, MAX_BYTES, Annotation
from tinkerscript.page.search_index import SEARCH_FILE
from written_run import WrittenRun

TOKEN = "the-admin-token-of-this-test"
NOTE = {"note": "lr too high", "tags": ["baseline", "seed 2"]}


def made(folder: Path, *, model: str = "tiny", **facts: Any) -> Path:
    with WrittenRun(folder, engine={"model": model}) as run:
        run.status(**{"state": "finished", "began": 5.0, **facts})
        run.episode(f"e-{folder.name}")
    (folder / "checkpoints" / "final").mkdir(parents=True)
    (folder / "checkpoints" / "final" / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs and a link to the second."""
    for name in ("one", "two"):
        made(tmp_path / "runs" / name)
    (tmp_path / "runs" / "latest").symlink_to("two")
    return tmp_path / "runs"


async def names(client: httpx.AsyncClient) -> list[str]:
    return sorted(run["name"] for run in (await client.get("/api/runs")).json()["runs"])


async def test_a_note_and_tags_are_shown_with_the_run(runs: Path) -> None:
    async with page(runs) as client:
        untidy = {"note": " lr too high\n", "tags": [" baseline", "seed 2", "baseline"]}
        reply = await client.post("/api/runs/one/annotation", json=untidy)
        assert (reply.status_code, reply.json()) == (200, NOTE)
        for path in ("/api/runs/one", "/api/runs"):
            body = (await client.get(path)).json()
            shown = next(run for run in body.get("runs", [body]) if run["name"] == "one")
            assert {name: shown[name] for name in NOTE} == NOTE
        (entry,) = (await client.get("/api/runs/one/audit")).json()
        assert (entry["action"], entry["tags"]) == ("annotate", NOTE["tags"])
        assert not (await client.get("/api/runs/two")).json()["note"]
        await client.post("/api/runs/one/annotation", json={})
        assert not (await client.get("/api/runs/one")).json()["tags"], "they are replaced, and may go"


TOO_LONG: list[tuple[dict[str, Any], int]] = [
    *(({"note": "x" * 4001}, 422), ({"note": "\ud83d"}, 422), ({"note": "x" * 2**20}, 413)),
    *(({"tags": tags}, 422) for tags in (["x" * 41], [f"t{n}" for n in range(21)], ["a,b"], [" "])),
]


async def test_what_is_too_long_is_refused(runs: Path) -> None:
    async with page(runs) as client:
        headers = {"content-type": "application/json"}
        for body, status in TOO_LONG:
            reply = await client.post("/api/runs/one/annotation", content=json.dumps(body), headers=headers)
            assert reply.status_code == status
    assert not (runs / "one" / ANNOTATION_FILE).exists()


def test_the_longest_annotation_can_be_read_again() -> None:
    tags = [f"{number:02}" + "\U0001f600" * 38 for number in range(20)]
    text = json.dumps(Annotation(note="\U0001f600" * 4000, tags=tags).model_dump(), indent=2)
    assert len(text) < MAX_BYTES


async def test_a_file_from_elsewhere_is_read_as_nothing(runs: Path) -> None:
    path = runs / "one" / ANNOTATION_FILE
    async with page(runs) as client:
        for content in ("", "{", '{"note": 1}', '{"note": "' + "x" * 2 * MAX_BYTES + '"}', "[" * 100_000):
            path.write_text(content)
            assert (await client.get("/api/runs/one")).json()["note"] == ""
        path.unlink()
        os.mkfifo(path)
        assert (await client.get("/api/runs/one")).json()["note"] == ""


async def test_no_link_in_a_run_is_written_through(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    for name in (ANNOTATION_FILE, AUDIT_FILE, "trainer.lock", "server.lock"):
        (runs / "one" / name).symlink_to(target)
    (runs / "one" / "outside").symlink_to(tmp_path / "runs" / "two")
    async with page(runs) as client:
        refused = await client.post("/api/runs/one/annotation", json=NOTE)
        assert (refused.status_code, target.read_text()) == (409, "mine"), refused.text
        deleted = await client.post("/api/runs/one/delete", json={"name": "one"})
    assert (deleted.status_code, target.read_text()) == (200, "mine")
    assert (runs / "two" / LEDGER_FILE).exists()


# Deletion


async def test_a_run_that_has_ended_is_deleted(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerscript.page.runs.LOOK_AGAIN_S", 0.0)
    async with page(runs) as client:
        assert await names(client) == ["one", "two"]
        assert (await client.get("/api/episodes/e-two")).status_code == 200
        assert len((await client.get("/api/runs/two/search?q=reply")).json()["episodes"]) == 1
        reply = await client.post("/api/runs/two/delete", json={"name": "two"})
        assert [run["name"] for run in reply.json()["runs"]] == ["one"]
        assert sorted(path.name for path in runs.iterdir()) == [AUDIT_FILE, "one"], "nor a link to nothing"
        for path in ("/api/runs/two", "/api/episodes/e-two"):
            assert (await client.get(path)).status_code == 404
        entry = json.loads((runs / AUDIT_FILE).read_text())
        assert (entry["action"], entry["run"]) == ("delete", "two")
        made(runs / "two", model="another")
        assert (await client.get("/api/runs/two")).json()["model"] == "another", "the name is free again"
        again = await client.get("/api/runs/two/search?q=reply")
        assert len(again.json()["episodes"]) == 1, "which is searched anew"
        assert (runs / "two" / SEARCH_FILE).exists()


@pytest.mark.parametrize("lock", ["trainer.lock", "server.lock"])
async def test_a_run_that_goes_on_is_not_deleted(runs: Path, lock: str) -> None:
    made(runs / "live", state="running", process=list(ProcessId.own()))
    held = try_lock(runs / "one" / lock)
    assert held is not None
    with held:
        async with page(runs) as client:
            for name, reason in (("live", "live is running"), ("one", f"a {lock[:-5]} is running")):
                reply = await client.post(f"/api/runs/{name}/delete", json={"name": name})
                assert reply.status_code == 409
                assert reason in reply.json()["failure_reason"]
                assert (runs / name / LEDGER_FILE).exists()


@pytest.mark.parametrize("name", ["two", "latest", ".", "..", "../one", "", "/"])
async def test_only_runs_of_the_folder_are_deleted_by_name(runs: Path, tmp_path: Path, name: str) -> None:
    elsewhere = made(tmp_path / "elsewhere" / "three")
    (runs / "three").symlink_to(elsewhere)
    async with page(runs) as client:
        for run in ("one", "three", "latest", "%2e%2e", "..%2felsewhere%2fthree"):
            reply = await client.post(f"/api/runs/{run}/delete", json={"name": name})
            assert reply.status_code in (404, 405, 409), (run, name)
    assert (elsewhere / LEDGER_FILE).exists()
    assert all((runs / run / LEDGER_FILE).exists() for run in ("one", "two", "three"))


async def test_the_page_of_one_run_does_not_delete_it(runs: Path) -> None:
    async with page(runs / "one") as client:
        reply = await client.post("/api/runs/one/delete", json={"name": "one"})
    assert reply.status_code == 409
    assert f"tinkerscript view {runs}" in reply.json()["failure_reason"]
    assert (runs / "one" / LEDGER_FILE).exists()


@pytest.mark.parametrize(("action", "body"), [("annotation", NOTE), ("delete", {"name": "one"})])
async def test_only_the_page_itself_and_the_admin_change_runs(
    runs: Path, action: str, body: dict[str, Any]
) -> None:
    path = f"/api/runs/one/{action}"
    async with page(runs) as client:
        foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "host": "evil.example"}
        for name, value in foreign.items():
            assert (await client.post(path, json=body, headers={name: value})).status_code == 403, name
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            sent = await client.post(path, content=json.dumps(body), headers={"content-type": kind})
            assert sent.status_code == 422, kind
    async with page(runs, TOKEN) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await client.post(path, json=body, headers=headers)).status_code == 401
        assert not (runs / "one" / ANNOTATION_FILE).exists()
        assert (runs / "one" / LEDGER_FILE).exists()
        own = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.post(path, json=body, headers=own)).status_code == 200
