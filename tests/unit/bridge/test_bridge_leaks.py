"""Nothing leaks: episodes that are cancelled at every stage, abandoned, or fail leave the process as it was.

BRIDGE_STORM is the number of episodes; the long form (`make chaos`) has 500.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from bridge_parts import bytes_renderer
from bridge_storm import EXPECTED, FATES, held, settled, storm, storm_task
from inspect_tinker_bridge import TaskRunner, load_inspect_task

EPISODES = int(os.environ.get("BRIDGE_STORM", "28"))


@pytest.mark.timeout(60 + 2 * EPISODES)
async def test_a_storm_of_episodes_leaves_nothing_behind(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    renderer = bytes_renderer(byte_model)
    info = load_inspect_task(storm_task(EPISODES, seed=EPISODES))
    good = next(sample for sample in info.samples if (sample.metadata or {})["fate"] == "ends")
    outside = held(tmp_path)
    async with TaskRunner(info) as runner:
        await storm(runner, [good] * 1, renderer, at_once=1)  # what is made once is made
        before = await settled(tmp_path, held(tmp_path))
        ended = await storm(runner, info.samples, renderer, at_once=8)
        assert dict(ended.keys()) == EXPECTED
        assert {fate for fate, _ in ended} == set(FATES)
        assert await settled(tmp_path, before) == before
        again = await storm(runner, [good], renderer, at_once=1)
        assert list(again) == [("ends", "ended, 1.0")]
    assert (await settled(tmp_path, outside, within_s=2.0))["folders"] == outside["folders"]
    assert held(tmp_path)["children"] == outside["children"]
