"""Thousands of episodes on PostgreSQL, while the database is killed and its two servers replace each other.

As in `test_kills.py`, with the hostile clients that are after results. CHAOS_CLAIM_S is how long they can
hold an episode. The defaults are `make chaos`; `make cluster` has a short form.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conductor import CLAIMERS, Conductor
from evidence import SCHEMA
from test_kills import faultless, number, plan_of

from postgres_server import running_postgres


@pytest.mark.timeout(3000)
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    longest_claim_s = number("CLAIM_S", 60)
    plan = plan_of(workers=12, kills=16, max_claim_s=longest_claim_s, limit_s=2800.0, hostile=CLAIMERS)
    with running_postgres() as database:
        conductor = Conductor(plan, tmp_path, database)
        faultless(conductor, capfd)
        ((terms,),) = database.query(f"SELECT epoch FROM {SCHEMA}.lease")
    # A server that served and was killed or stopped began a term that another one ended. On a slow machine
    # some are killed before they serve.
    assert 2 * terms > conductor.kills["server"] + conductor.kills["stopped server"]
