"""The server's metrics: what the trainer reports is taken over, and never breaks a scrape."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clock import Clock
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.metrics import MAX_TRAINERS_BYTES, ServerMetrics
from tinkerscript.train.step_metrics import MAX_NAMES, TrainerMetrics


@pytest.fixture
def metrics(clock: Clock) -> ServerMetrics:
    return ServerMetrics(EpisodeBook(clock=clock, max_attempts=1))


def values(text: bytes) -> dict[str, float]:
    """Every sample, by its name and labels."""
    families = text_string_to_metric_families(text.decode())
    found = [sample for family in families for sample in family.samples]
    return {" ".join([one.name, *(f"{k}={v}" for k, v in one.labels.items())]): one.value for one in found}


def test_the_trainers_metrics_are_taken_over_until_it_is_gone(metrics: ServerMetrics) -> None:
    trainer = TrainerMetrics()
    trainer.log_metrics({"reward/mean": 0.5, "episode/chosen by a client": 1.0, "failure/by one": 2.0}, 7)
    assert metrics.add_trainers(trainer.text())
    found = values(metrics.render())
    assert found["tinkerscript_trainer_step"] == 7
    assert found["tinkerscript_trainer_metric metric=reward/mean"] == 0.5
    assert not [name for name in found if "chosen" in name or "by one" in name]
    metrics.forget_trainer()
    assert "tinkerscript_trainer_step" not in values(metrics.render())


@pytest.mark.parametrize(
    "text",
    [
        b"tinkerscript_episodes 1\n",
        b"tinkerscript_trainer_x{y= 1\n",
        b"tinkerscript_trainer_x one\n",
        b"\xff",
        b"tinkerscript_trainer_x 1\n" * (MAX_TRAINERS_BYTES // 20),
    ],
    ids=["another's", "cut off", "no number", "no text", "too long"],
)
def test_what_is_no_metric_of_the_trainers_changes_nothing(metrics: ServerMetrics, text: bytes) -> None:
    assert metrics.add_trainers(b"tinkerscript_trainer_x 1\n")
    assert not metrics.add_trainers(text)
    assert values(metrics.render())["tinkerscript_trainer_x"] == 1


def test_a_trainer_exports_a_bounded_number_of_metrics() -> None:
    trainer = TrainerMetrics()
    for number in range(10 * MAX_NAMES):
        trainer.log_metrics({f"made/{number}": 1.0})
    assert sum(name.startswith("tinkerscript_trainer_metric") for name in values(trainer.text())) == MAX_NAMES
