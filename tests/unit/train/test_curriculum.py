"""What a curriculum passes over, and that it depends on nothing but what steps have taken."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rollout_helpers import make_accepted
from tinkerscript.config import CurriculumConfig, RunConfig
from tinkerscript.train.curriculum import LEAST, REVISIT, Curriculum
from tinkerscript.trainer_link.messages import EpisodeFailed, Outcome


def payload(name: str) -> dict[str, Any]:
    return {"task": "t", "sample": {"id": name}}


def outcomes(*rewards: float, **more: Any) -> list[Outcome]:
    return [make_accepted(f"e{i}", reward, **more) for i, reward in enumerate(rewards)]


def made() -> Curriculum:
    return Curriculum(CurriculumConfig(by="pass_rate"), seed=3)


def share(curriculum: Curriculum, name: str, *, of: int = 2000) -> float:
    """Of the positions of a sample: those that are asked."""
    return sum(curriculum.admits(position, payload(name)) for position in range(of)) / of


def test_a_sample_is_asked_as_often_as_it_teaches() -> None:
    curriculum = made()
    assert share(curriculum, "new") == 1.0
    groups = {"solved": (1, 1), "hopeless": (0, 0), "half": (1, 0), "rare": (1, *[0] * 15)}
    for name, rewards in groups.items():
        curriculum.note(payload(name), outcomes(*rewards))
    asked = {name: round(share(curriculum, name), 1) for name in groups}
    assert asked == {"solved": REVISIT, "hopeless": REVISIT, "half": 1.0, "rare": round(LEAST, 1)}
    assert curriculum.metrics(None) | {"curriculum/passed_over": 0.0} == {
        "curriculum/open": 2.0,
        "curriculum/solved": 1.0,
        "curriculum/hopeless": 1.0,
        "curriculum/passed_over": 0.0,
    }
    assert curriculum.metrics(None)["curriculum/passed_over"] == 0.0, "it counts since the last step"


def test_a_retired_sample_is_open_again_once_its_rate_moves() -> None:
    curriculum = made()
    for rewards in ((0, 0), (1, 0)):
        curriculum.note(payload("late"), outcomes(*rewards))
    assert curriculum.rates == {"t\nlate": 0.25}
    assert share(curriculum, "late") == pytest.approx(0.75, abs=0.03)


def test_a_pass_is_a_success_or_a_reward_that_is_high_enough() -> None:
    curriculum = Curriculum(CurriculumConfig(by="pass_rate", pass_reward=0.5), seed=1)
    curriculum.note(payload("a"), outcomes(0.5, 0.4))
    curriculum.note(payload("b"), outcomes(0.0, 0.0, is_success=True))
    failed = EpisodeFailed(episode_uuid="f", failures=[])
    curriculum.note(payload("c"), [failed, *outcomes(1.0)])
    curriculum.note(payload("d"), [failed])
    assert curriculum.rates == {"t\na": 0.5, "t\nb": 1.0, "t\nc": 1.0}, "a failure is no pass rate of 0"


def test_what_is_restored_asks_the_same() -> None:
    curriculum, again = made(), made()
    for name, rewards in {"a": (1, 1), "b": (0, 1, 0, 0)}.items():
        curriculum.note(payload(name), outcomes(*rewards))
    again.restore(curriculum.state())
    decisions = Counter[bool]()
    for position in range(300):
        for name in "abc":
            admitted = curriculum.admits(position, payload(name))
            decisions[admitted] += 1
            assert again.admits(position, payload(name)) == admitted
    assert min(decisions.values()) > 100


def test_a_curriculum_needs_samples_to_choose_from() -> None:
    with pytest.raises(ValueError, match=r"set task\.name"):
        RunConfig.model_validate({"training": {"curriculum": {"by": "pass_rate"}}})
