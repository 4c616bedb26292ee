"""Real training with a corrupted sampler: the run stops before the weights change, and says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from run_ledger import rows
from short_runs import short_run
from tinkerscript.config import RunConfig
from tinkerscript.errors import AlignmentError
from tinkerscript.ledger.health import health_rows
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import PublicationRow, StepRow, TrainedRow, Use
from tinkerscript.page.curves import found_in
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.policy import Policy
from tinkerscript.train.run import run_training
from tiny_tokenizer import write_model_folder

WORDS_TASK = """
from tinkerscript.workers.base_task import Task


class Words(Task):
    def samples(self, *, held_out):
        return [{"id": f"s{i}", "input": f"Say {i}"} for i in range(6)]

    async def rollout(self, sample, model):
        said = await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=16)
        return float(sum(map(ord, said)) % 97)
"""


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs copy their summary to `runs/latest` of the current folder."""
    monkeypatch.chdir(tmp_path)


Corruption = Callable[[list[int], list[float]], tuple[list[int], list[float]]]
"""Of ids and log probabilities."""


class CorruptSampler(Sampler):
    """A backend's sampler whose results pass through `corrupt`."""

    def __init__(self, honest: Sampler, corrupt: Corruption) -> None:
        self._honest = honest
        self._corrupt = corrupt

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        result = await self._honest.sample(request, progress)
        sequences: list[SampledSequence] = []
        for sequence in result.sequences:
            honest = unpack_ids(sequence.sampled).tolist(), unpack_logprobs(sequence.logprobs).tolist()
            ids, logprobs = self._corrupt(*honest)
            corrupted = {"sampled": pack_ids(ids), "logprobs": pack_logprobs(logprobs)}
            sequences.append(structs.replace(sequence, **corrupted))
        return structs.replace(result, sequences=sequences)


def corrupting(corrupt: Corruption, *, from_version: int = 0) -> type[Policy]:
    class CorruptPolicy(Policy):
        async def publish(self, step: int = 0) -> int:
            version = await super().publish(step)
            if version >= from_version:
                self.sampler.sampler = CorruptSampler(self.sampler.sampler, corrupt)
            return version

    return CorruptPolicy


def late(ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return ids, [logprobs[-1], *logprobs[:-1]]


def cut(ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return ids, logprobs[:-2]


def from_text(ids: list[int], logprobs: list[float], *, model: Path) -> tuple[list[int], list[float]]:
    """Ids made of the text, and the log probabilities cut or repeated until they fit."""
    tokenizer = LightTokenizer(model)
    made = tokenizer.encode(tokenizer.decode(ids))
    padding = [logprobs[-1]] * max(0, len(made) - len(logprobs))
    return made, [*logprobs, *padding][: len(made)]


@pytest.fixture(scope="module")
def babbling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over single bytes: peaked distributions, text that is rarely canonical."""
    from small_models import small_model

    folder = tmp_path_factory.mktemp("models") / "babbling"
    shape = {
        **{"vocab_size": 272, "hidden_size": 48, "intermediate_size": 96, "num_key_value_heads": 2},
        **{"head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 262},
    }
    small_model("Qwen3", seed=1, **shape, initializer_range=0.25).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    del saved["max_position_embeddings"]
    return write_model_folder(folder, max_context=512, **saved)


def babbling_run(tmp_path: Path, model: Path, **training: Any) -> RunConfig:
    (tmp_path / "words.py").write_text(WORDS_TASK)
    return short_run(
        "run",
        engine={"model": str(model)},
        task={"name": f"{tmp_path / 'words.py'}:Words"},
        training={"steps": 2, "groups_per_step": 3, "group_size": 4, **training},
    )


@pytest.mark.parametrize(
    ("corrupt", "name", "words"),
    [
        (cut, "lengths_differ", r"the sampler returned \d+ token ids and \d+ logprobs"),
        (from_text, "ids_retokenised", "ids were encoded from text in place of the sampled ones"),
    ],
)
async def test_a_corrupted_sampler_stops_the_run_and_is_named(
    tmp_path: Path,
    babbling_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Corruption,
    name: str,
    words: str,
) -> None:
    corrupt = partial(from_text, model=babbling_model) if corrupt is from_text else corrupt
    monkeypatch.setattr("tinkerscript.train.run.Policy", corrupting(corrupt))
    with pytest.raises(AlignmentError, match=f"{name}: .*{words}") as raised:
        await run_training(babbling_run(tmp_path, babbling_model), QuietReporter())
    assert raised.value.name == name
    report = json.loads((tmp_path / "run" / "alignment.json").read_text())
    assert [(f["step"], f["name"]) for f in report["findings"]] == [(1, name)]
    assert report["tokens_trained"] == 0
    assert [row.policy_version for row in rows(tmp_path / "run", PublicationRow)] == [0]
    stopped = [] if corrupt is cut else [(1, name)]  # What is cut ends the run before a batch is full.
    assert [(row.step, row.stopped) for row in rows(tmp_path / "run", StepRow)] == stopped
    assert {row.outcome for row in rows(tmp_path / "run", TrainedRow)} <= {Use.SET_ASIDE}
    (finding,) = found_in(LedgerReader(tmp_path / "run"), "finding", name).found
    assert (finding.step, bool(finding.detail)) == (1, True)


async def test_a_run_goes_on_with_a_warning_if_it_is_told_to(
    tmp_path: Path, babbling_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerscript.train.run.Policy", corrupting(late, from_version=1))
    watcher = QuietReporter()
    config = babbling_run(tmp_path, babbling_model, on_misalignment="warn")
    folder = await run_training(config, watcher)
    report = json.loads((folder.path / "alignment.json").read_text())
    assert [(f["step"], f["name"]) for f in report["findings"]] == [(2, "logprobs_shifted")]
    assert any(
        note.startswith("step 2: logprobs_shifted: the logprobs are 1 token") for note in watcher.notes
    )
    first, second = watcher.steps
    assert first["train/sequences"] == 12, "the honest sampler is aligned"
    assert first["alignment/max_abs_dlogp"] <= 1e-4
    assert second["alignment/errors/logprobs_shifted"] == 12 - second["train/sequences"] >= 6
    (row,) = [row for row in health_rows(LedgerReader(folder.path)) if row.name == "mismatch"]
    assert (row.kind, row.words) == ("bad", "1 steps whose tokens the trainer did not reproduce")
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["steps"] == 2
    assert any(line.startswith("not trained, ") for line in summary["alignment"])
