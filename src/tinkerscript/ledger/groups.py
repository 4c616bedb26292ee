from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.compression import DICTIONARIES, Dictionaries
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, decoded, digests_in, with_files
from tinkerscript.ledger.rows import LEDGER_VERSION, Use
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import calls_of
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts

_GROUPS = """
SELECT group_id FROM episodes WHERE state = 'ended' AND episode_type = 'train'
    GROUP BY group_id ORDER BY min(sequence)
"""

_MEMBERS = """
SELECT sequence, uuid, coalesce(v.reward, e.reward), result,
    (SELECT max(attempt) FROM attempts WHERE episode = sequence), v.episode IS NOT NULL
    FROM episodes AS e JOIN results AS r ON r.episode = sequence
    LEFT JOIN verdicts AS v ON v.episode = sequence
    WHERE group_id = ? AND state = 'ended' AND episode_type = 'train' AND emptied = 0
    AND NOT (v.episode IS NOT NULL AND v.reward IS NULL)
    AND NOT EXISTS (SELECT 1 FROM trained AS t WHERE t.episode = sequence AND outcome = ?)
    ORDER BY end_number
"""


class _Member(NamedTuple):
    sequence: int
    uuid: str
    reward: float
    result: bytes
    attempt: int
    is_judged: int


class _Result(msgspec.Struct):
    metadata: dict[str, Any] = {}
    call_rewards: dict[str, float] = {}


def recorded_groups(run_dir: Path, *, trains_constrained: bool = False) -> Iterator[RolloutGroup]:
    """Yield a run's training episodes with a result, by group, oldest first.

    A group may be smaller than planned, and need not have trained. It lacks episodes that are misaligned,
    lost their calls to `recording_limit_mb` or could not be judged. Judges' verdicts replace rewards.
    """
    path = run_dir / LEDGER_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {LEDGER_FILE}: is it the folder of a run?")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as run:
            (version,) = run.execute("PRAGMA user_version").fetchone()
            if version != LEDGER_VERSION:
                raise ConfigError(
                    f"{path} has version {version}, and this tinkerscript reads {LEDGER_VERSION}"
                )
            facts = DICTIONARIES.replace("{s}", "")
            dictionaries = Dictionaries(lambda: (content for _, content in run.execute(facts).fetchall()))
            for (group_id,) in run.execute(_GROUPS).fetchall():
                members = run.execute(_MEMBERS, (group_id, Use.SET_ASIDE)).fetchall()
                episodes = list[EpisodeRollouts]()
                for member in (_Member(*each) for each in members):
                    try:
                        episodes.append(_episode(run, dictionaries, group_id, member, trains_constrained))
                    except Exception as error:  # A ledger from elsewhere may hold anything.
                        raise ConfigError(
                            f"{path}: episode {member.uuid!r} cannot be read ({error!r}); use another run"
                        ) from error
                if episodes:
                    yield RolloutGroup(group_id, tuple(episodes))
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of a whole run") from error


def _episode(
    run: sqlite3.Connection,
    dictionaries: Dictionaries,
    group_id: str,
    member: _Member,
    trains_constrained: bool,
) -> EpisodeRollouts:
    query = CALLS_OF_CLAIM.replace("{s}", "")
    found = run.execute(query, (member.sequence, member.attempt)).fetchall()
    calls = calls_of(decoded(found, dictionaries))
    calls = with_files(calls, {digest: _file(run, digest) for digest in digests_in(calls)})
    rollouts = merge_calls(calls, episode_uuid=member.uuid, trains_constrained=trains_constrained)
    result = msgspec.json.decode(member.result, type=_Result)
    return EpisodeRollouts(
        member.uuid,
        member.reward,
        tuple(each.rewarded(member.reward, env_example_id=group_id) for each in rollouts),
        tuple(calls),
        result.metadata,
        call_rewards={} if member.is_judged else result.call_rewards,
    )


def _file(run: sqlite3.Connection, digest: bytes) -> bytes:
    ((file,),) = run.execute("SELECT file FROM images WHERE digest = ?", (digest,)).fetchall()
    return file
