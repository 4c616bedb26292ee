"""What recording costs an episode: the trainer's processor time, and bytes in the run's record.

`written`: what the record's writer takes of an episode, its tokens and its part of a step, by itself.
`recording_part`: the demo's training over the network with `recording: all` and with `recording: off`, in
alternating pairs. The trainer samples and trains in the same process, so its time holds all of that; the
difference is the recording. Bytes are those of the whole file, and of one long episode alone.
"""

from __future__ import annotations

import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from episodes import cpu_seconds, wait_for_lines
from tinkerscript.record.entries import RecordedEpisode, TrainedEpisode
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter

MOST_AHEAD = 500
CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"


def trained(recording: str, steps: int) -> dict[str, float]:
    """Train the demo for `steps` steps, of which the first one is warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = {
            "experiment_dir": run_dir,
            "recording": recording,
            "training.steps": steps,
            "evaluation.episodes": 0,
            "evaluation.every_steps": 0,
            "interchange_server.interchange_server_port": 0,
        }
        command = [sys.executable, "-m", "tinkerscript", "train", str(CONFIG)]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        trainer = psutil.Process(process.pid)
        wait_for_lines(run_dir / "metrics.jsonl", 1, process)
        before = cpu_seconds(trainer)["trainer"]
        wait_for_lines(run_dir / "metrics.jsonl", steps, process)
        used = cpu_seconds(trainer)["trainer"] - before
        if process.wait():
            raise SystemExit(f"the run failed with exit code {process.returncode}")
        record = Record(run_dir)
        accepted = record.number("SELECT sum(accepted + failed) FROM steps WHERE step > 1") or 0
        return {"cpu_ms": 1000 * used / accepted, **_sizes(record)}


def _sizes(record: Record) -> dict[str, float]:
    """Bytes of the file; tokens, and those sampled, of what it has."""
    tokens, sampled, episodes = record.rows(
        "SELECT coalesce(sum(prompt_tokens + sampled_tokens), 0), coalesce(sum(sampled_tokens), 0), count(*) "
        "FROM episodes"
    )[0]
    size = (record.folder / RECORD_FILE).stat().st_size
    return {"bytes": size, "tokens": tokens, "sampled": sampled, "episodes": episodes}


def recording_part(rounds: int, steps: int) -> dict[str, Any]:
    """Medians over alternating pairs."""
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        order = ("all", "off")[:: 1 if number % 2 else -1]
        pairs.append({recording: trained(recording, steps) for recording in order})
    one = pairs[0]["all"]
    return {
        "trainer, ms an episode": {
            kind: round(statistics.median(pair[kind]["cpu_ms"] for pair in pairs), 2)
            for kind in ("all", "off")
        },
        "recording, ms an episode": [round(p["all"]["cpu_ms"] - p["off"]["cpu_ms"], 2) for p in pairs],
        "ratio": round(statistics.median(p["all"]["cpu_ms"] / p["off"]["cpu_ms"] for p in pairs), 3),
        "the demo: tokens an episode": round(one["tokens"] / one["episodes"], 1),
        "the demo: bytes an episode": round(one["bytes"] / one["episodes"]),
        "the demo: bytes a token": round(one["bytes"] / one["tokens"], 1),
    }


def written(folder: Path, rounds: int) -> dict[str, Any]:
    """What the writer alone takes of an episode and its step: the record in `folder` written once more."""
    record = Record(folder)
    episodes = [_entries(record, row) for row in record.rows(_RECORDED)]
    costs: list[float] = []
    sizes: dict[str, float] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            began = time.process_time()
            with RecordWriter(Path(name) / RECORD_FILE) as writer:
                for number, (episode, trained_episode) in enumerate(episodes):
                    writer.episode(episode)
                    writer.trained(episode.step, [trained_episode])
                    if number % MOST_AHEAD == 0:
                        writer.flush()
            costs.append(1000 * (time.process_time() - began) / len(episodes))
            assert not writer.dropped
            sizes = _sizes(Record(Path(name)))
    return {
        "ms an episode": round(statistics.median(costs), 3),
        "tokens an episode": round(sizes["tokens"] / sizes["episodes"]),
        "bytes an episode": round(sizes["bytes"] / sizes["episodes"]),
        "bytes a token": round(sizes["bytes"] / sizes["tokens"], 1),
    }


def _entries(record: Record, row: sqlite3.Row) -> tuple[RecordedEpisode, TrainedEpisode]:
    detail = record.detail(row["number"])
    assert detail is not None
    episode = RecordedEpisode(
        uuid=row["uuid"],
        episode_type=row["type"],
        step=row["step"],
        group_id=row["group_id"],
        status=row["status"],
        reward=row["reward"],
        ended=row["ended"],
        detail=detail,
    )
    sequences = record.sequences(row["number"])[row["step"]]
    return episode, TrainedEpisode(uuid=row["uuid"], outcome="trained", sequences=sequences)


_RECORDED = "SELECT * FROM episodes WHERE number IN (SELECT episode FROM trained WHERE sequences IS NOT NULL)"


def long_episode(folder: Path, uuid: str) -> dict[str, Any]:
    """Bytes a token of one long episode's calls and of what training left of them."""
    record = Record(folder)
    row = record.row(
        "SELECT number, prompt_tokens + sampled_tokens AS tokens, sampled_tokens FROM episodes "
        "WHERE uuid = ?",
        (uuid,),
    )
    assert row is not None
    details = record.number("SELECT length(detail) FROM details WHERE episode = ?", (row["number"],)) or 0
    trained_bytes = record.number(
        "SELECT sum(length(sequences)) FROM trained WHERE episode = ?", (row["number"],)
    )
    return {
        "tokens": row["tokens"],
        "sampled": row["sampled_tokens"],
        "bytes a token": round((details + (trained_bytes or 0)) / row["tokens"], 2),
        "of calls": round(details / row["tokens"], 2),
    }
