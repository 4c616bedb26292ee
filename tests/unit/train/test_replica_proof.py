"""Whether a replica has a version, by how its log probabilities change: never proved for another one."""

from __future__ import annotations

import numpy as np
import pytest

from tinkerscript.train.replicas.proof import Scores, Verdict, judge

POSITIONS, TOKENS = 32, 20


def scores(
    *, change: float, replica_has: float, noise: float, seed: int = 0, tilt: float = 0.0
) -> tuple[Scores, Scores]:
    """A replica's and the trainer's. `change`: of the trainer's log probabilities from one version to the
    other; `replica_has`: the share of it that the replica shows; `noise`: of its kernels; `tilt`: a constant
    difference between the kernels."""
    rng = np.random.default_rng(seed)
    shape = (POSITIONS, TOKENS)
    older = rng.uniform(-12, -0.1, shape)
    changes = rng.normal(0, change, shape)
    kernels = rng.normal(0, tilt, shape)
    theirs = [older + kernels + rng.normal(0, noise, shape), None]
    theirs[1] = older + kernels + replica_has * changes + rng.normal(0, noise, shape)
    replica = Scores(list(theirs[0].astype(np.float32)), list(theirs[1].astype(np.float32)))
    return replica, Scores(list(older.astype(np.float32)), list((older + changes).astype(np.float32)))


FLOAT32, BFLOAT16 = 2e-5, 0.04
"""Differences between kernels, in nats."""


@pytest.mark.parametrize(
    ("change", "noise", "replica_has", "verdict"),
    [
        (1.0, FLOAT32, 1.0, "proved"),
        (5e-4, FLOAT32, 1.0, "proved"),  # A step at a learning rate of 1e-5.
        (5e-4, FLOAT32, 0.0, "refused"),
        (5e-4, BFLOAT16, 1.0, "undecidable"),
        (5e-4, BFLOAT16, 0.0, "undecidable"),
        (1.0, BFLOAT16, 1.0, "proved"),  # A canary.
        (1.0, BFLOAT16, 0.0, "refused"),
        (1.0, FLOAT32, 2.0, "refused"),  # A later version.
        (1.0, FLOAT32, 0.9, "refused"),  # A part of it.
        (1.0, FLOAT32, 0.99, "proved"),
        (1.0, BFLOAT16, 0.9, "proved"),  # Rounding hides as much.
        (0.0, FLOAT32, 1.0, "unchanged"),
    ],
)
def test_a_version_is_proved_where_its_change_shows(
    change: float, noise: float, replica_has: float, verdict: Verdict
) -> None:
    evidence = judge(*scores(change=change, replica_has=replica_has, noise=noise))
    assert evidence.verdict == verdict, evidence


def test_constant_differences_of_kernels_decide_nothing() -> None:
    tilted = judge(*scores(change=5e-4, replica_has=1.0, noise=FLOAT32, tilt=0.3))
    assert tilted.verdict == "proved"
    assert tilted.gap > 0.3


@pytest.mark.parametrize("noise", [FLOAT32, BFLOAT16])
def test_the_older_version_is_never_proved(noise: float) -> None:
    verdicts = [
        judge(*scores(change=5e-4, replica_has=0.0, noise=noise, seed=seed)).verdict for seed in range(200)
    ]
    assert "proved" not in verdicts
    assert set(verdicts) == ({"refused"} if noise == FLOAT32 else {"undecidable"} | set(verdicts))


@pytest.mark.parametrize(
    ("change", "replica_has", "verdict"),
    [(5e-4, 1.0, "undecidable"), (5e-4, 0.0, "undecidable"), (1.0, 1.0, "proved"), (1.0, 0.0, "refused")],
)
def test_a_trainer_that_rounds_refuses_nothing_for_its_own_noise(
    change: float, replica_has: float, verdict: Verdict
) -> None:
    """The slope on a change that is mostly rounding is near 0, whatever the replica has."""
    replica, trainer = scores(change=change, replica_has=replica_has, noise=0.0)
    rng = np.random.default_rng(9)
    older, newer = (
        [row + rng.normal(0, BFLOAT16, row.shape).astype(np.float32) for row in rows]
        for rows in (trainer.older, trainer.newer)
    )
    evidence = judge(replica, Scores(older, newer), exact=False)
    assert evidence.verdict == verdict, evidence
    if change < BFLOAT16 and replica_has:
        assert judge(replica, Scores(older, newer)).verdict == "refused", "and would be refused unjustly"


def test_values_that_a_server_clips_are_left_out() -> None:
    replica, trainer = scores(change=0.1, replica_has=1.0, noise=FLOAT32)
    replica.newer[3][5] = -9999.0
    replica.older[4][6] = np.nan
    evidence = judge(replica, trainer)
    assert evidence.verdict == "proved"
    assert evidence.tokens == POSITIONS * TOKENS - 2


def test_too_few_positions_decide_nothing() -> None:
    replica, trainer = scores(change=1.0, replica_has=1.0, noise=FLOAT32)
    two = judge(Scores(replica.older[:2], replica.newer[:2]), Scores(trainer.older[:2], trainer.newer[:2]))
    assert two.verdict == "undecidable"
    with pytest.raises(ValueError, match="shorter"):
        judge(Scores(replica.older[:2], replica.newer[:2]), trainer)
