"""Replicas of vLLM, as its API is: the fake, which applies adapters with PEFT to the model that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_fakes import Faults
from interchange_helpers import until
from peft_vllm import PeftVllm
from serving import serving
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.vllm_plugin import WeightSource
from trained_adapter import trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


async def test_a_server_that_was_started_again_gets_the_versions_that_are_live(tmp_path: Path) -> None:
    """It has none of those that it is asked to forget, and says so."""
    source = WeightSource(str(tmp_path / "adapters"))
    fake = PeftVllm(TINY_MODEL, source, Faults(models=("base",), logprobs="processed"))
    with serving(fake.app) as url:
        async with trained(tmp_path, [url]) as at:
            for version in range(3):
                await at.publisher.publish(version)
                assert await at.ask(version) == version
                await at.step(1e-3)
            fake.restart()
            at.pool.lose(at.pool.replicas[0], "died")
            await until(lambda: len(at.notes) > 1, "it is back, or not")
            assert at.notes[-1].endswith("samples again")
            assert await at.ask(2) == 2
            held = {name.split("-")[2] for name in fake.adapters if name.startswith("policy-")}
            assert held == {"1", "2"}
    source.close()
