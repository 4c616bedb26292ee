"""`examples/minimal_grpo.py`: a short run learns, and one update moves probability the right way."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tinkerscript.model_folder import model_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json"))
GOOD, BAD = TOKENIZER.encode("68<|im_end|>").ids, TOKENIZER.encode("67<|im_end|>").ids


@pytest.fixture
def minimal_grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import minimal_grpo

    return minimal_grpo


async def test_a_short_run_trains_saves_and_raises_the_held_out_accuracy(
    minimal_grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minimal_grpo, "PROBLEMS", 16)
    monkeypatch.setattr(minimal_grpo, "EVAL_EPISODES", 64)
    monkeypatch.setattr(minimal_grpo, "INTERIM_EVAL_EPISODES", 8)
    await minimal_grpo.main(steps=2, seed=1)

    out = capsys.readouterr().out
    assert re.findall(r"^ *(\d+) .*\d\.\d{3} ", out, flags=re.MULTILINE) == ["0", "1", "2"]
    summary = re.search(r"temperature 1: (\d\.\d+) -> (\d\.\d+)", out)
    assert summary is not None
    before, after = map(float, summary.groups())
    assert 0.2 < before < 0.6
    assert after > before + 0.05

    weights = load_file(model_folder("tiny") / "model.safetensors")
    trained = load_file(tmp_path / "runs" / "minimal_grpo" / "final" / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(np.any(weights[name] != trained[name]) for name in weights)
