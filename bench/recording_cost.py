"""What `recording: all` costs an episode: processor time of trainer and server, and bytes in the ledger.

`recording_part`: the demo's training over the network with `recording: all` and with `recording: off`, in
alternating pairs. The trainer samples and trains in the same process, so its time holds all of that; the
difference is what is kept for each token. `written`: what packing and storing that takes by itself. Bytes are
those of the whole file, and of one long episode alone.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from episodes import cpu_seconds, wait_for_steps
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.ledger import row_of
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import EpisodeRow, TokensRow, columns
from tinkerscript.ledger.tokens import TrainedSequence, packed_sequences

CONFIG = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
PROCESSES = ("trainer", "server")


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
        wait_for_steps(run_dir / "metrics.jsonl", 1, process)
        before = cpu_seconds(trainer)
        wait_for_steps(run_dir / "metrics.jsonl", steps, process)
        after = cpu_seconds(trainer)
        if process.wait():
            raise SystemExit(f"the run failed with exit code {process.returncode}")
        ledger = LedgerReader(run_dir)
        ended = ledger.number("SELECT sum(accepted + failed) FROM steps WHERE step > 1") or 0
        return {name: 1000 * (after[name] - before[name]) / ended for name in PROCESSES} | _sizes(ledger)


def _sizes(ledger: LedgerReader) -> dict[str, float]:
    """Bytes of the file, and tokens and episodes in it."""
    tokens = ledger.number("SELECT coalesce(sum(prompt_tokens + sampled_tokens), 0) FROM calls") or 0
    episodes = ledger.number("SELECT count(*) FROM episodes WHERE end_number IS NOT NULL") or 0
    size = (ledger.folder / LEDGER_FILE).stat().st_size
    return {"bytes": size, "tokens": tokens, "episodes": episodes}


def recording_part(rounds: int, steps: int) -> dict[str, Any]:
    """Medians over alternating pairs."""
    pairs: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        order = ("all", "off")[:: 1 if number % 2 else -1]
        pairs.append({recording: trained(recording, steps) for recording in order})
    found: dict[str, Any] = {}
    for name in PROCESSES:
        found |= {
            f"{name}, ms an episode": {
                kind: round(statistics.median(pair[kind][name] for pair in pairs), 2)
                for kind in ("all", "off")
            },
            f"{name}, ms an episode more": [
                round(pair["all"][name] - pair["off"][name], 2) for pair in pairs
            ],
        }
    for kind in ("all", "off"):
        one = pairs[0][kind]
        found |= {
            f"{kind}: tokens an episode": round(one["tokens"] / one["episodes"], 1),
            f"{kind}: bytes an episode": round(one["bytes"] / one["episodes"]),
            f"{kind}: bytes a token": round(one["bytes"] / one["tokens"], 1),
        }
    return found


Trained = Sequence[tuple[int, dict[int, list[TrainedSequence]]]]
"""Episodes, and what each step did with their sequences."""


def written(folder: Path, rounds: int) -> dict[str, Any]:
    """What packing and storing what a step computed for each token takes: that of a run once more."""
    ledger = LedgerReader(folder)
    query = f"SELECT {', '.join(columns(EpisodeRow))} FROM episodes"
    episodes = [row_of(EpisodeRow, values) for values in ledger.rows(query)]
    trained = [
        (number, ledger.sequences(number)) for (number,) in ledger.rows("SELECT DISTINCT episode FROM tokens")
    ]
    costs, sizes = zip(*(asyncio.run(_store(episodes, trained)) for _ in range(rounds)), strict=True)
    every = [each for _, steps in trained for sequences in steps.values() for each in sequences]
    sampled = sum(len(each.uses) for each in every)
    return {
        "ms an episode": round(1000 * statistics.median(costs) / len(trained), 3),
        "sampled tokens an episode": round(sampled / len(trained)),
        "bytes a sampled token": round(sizes[0] / sampled, 1),
    }


async def _store(episodes: Sequence[EpisodeRow], trained: Trained) -> tuple[float, int]:
    """Seconds of processor time, and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = SqliteLedger(Path(folder) / LEDGER_FILE)
        await ledger.commit(episodes)
        began = time.process_time()
        by_step: dict[int, list[TokensRow]] = {}
        for number, steps in trained:
            for step, sequences in steps.items():
                row = TokensRow(episode=number, step=step, sequences=packed_sequences(sequences))
                by_step.setdefault(step, []).append(row)
        for rows in by_step.values():
            await ledger.commit(rows)
        spent = time.process_time() - began
        await ledger.close()
        return spent, ledger.bytes_put


def long_episode(folder: Path, uuid: str) -> dict[str, Any]:
    """Bytes a token of one long episode's calls, and of what training left of them."""
    ledger = LedgerReader(folder)
    row = ledger.row(
        "SELECT sequence, sum(prompt_tokens + sampled_tokens) AS tokens, sum(sampled_tokens) AS sampled, "
        "sum(length(call)) AS bytes FROM calls JOIN episodes ON sequence = episode WHERE uuid = ? "
        "GROUP BY sequence",
        (uuid,),
    )
    assert row is not None
    query = "SELECT coalesce(sum(length(sequences)), 0) FROM tokens WHERE episode = ?"
    of_tokens = ledger.number(query, (row["sequence"],)) or 0
    return {
        "tokens": row["tokens"],
        "sampled": row["sampled"],
        "bytes a token": round((row["bytes"] + of_tokens) / row["tokens"], 2),
        "of calls": round(row["bytes"] / row["tokens"], 2),
    }
