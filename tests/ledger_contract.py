"""What every `Ledger` does: the tests that each database has to pass.

A module with a fixture `reopen` makes a class of `LedgerContract`: the first call gives a ledger, the next
ones what a process finds that starts after the first was killed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import astuple
from zstandard import FRAME_HEADER, get_frame_parameters

from interchange_helpers import eventually
from run_ledger import claim, ended_episode
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.ledger import Ledger
from tinkerscript.ledger.compression import DICTIONARIES, DICTIONARY_BLOBS, unpacked
from tinkerscript.ledger.history import Tally, begin, find_beginning, tally
from tinkerscript.ledger.ledger import WriteBatch
from tinkerscript.ledger.rows import (
    TABLES,
    UNDONE,
    CallRow,
    CheckpointRow,
    EpisodeRow,
    EvaluationRow,
    FactRow,
    ImageRow,
    PublicationRow,
    ResumptionRow,
    Row,
    SampleRow,
    StepRow,
    TokensRow,
    TrainedRow,
    TranscriptRow,
    Use,
    VerdictRow,
    column_types,
)
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.rollouts.call import Call, PlacedImage, pack_ids, pack_logprobs

Reopen = Callable[[], Ledger]

TEXTS = ["", "a\0b", "\x01", "\x010\x011", "\0\x01\0", "'\"\\\n\r\t%s?", "\u2028 \U0001f600 \x7f", "\\u0000"]
"""PostgreSQL's text has no U+0000; a client may send it."""

ANY_BYTES = bytes(range(256))


async def leading(reopen: Reopen) -> Ledger:
    """A ledger that may be written."""
    ledger = reopen()
    await ledger.lead()
    return ledger


def made(kind: type[Row], number: int, text: str = "text", **values: Any) -> Any:
    """A row that differs from those with other numbers, and belongs to the episode of its own."""
    by_type: dict[type, object] = {
        int: number,
        float: number + 0.25,
        str: f"{text}{number}",
        bytes: ANY_BYTES + b"%d" % number,
    }
    found: dict[str, Any] = {
        name: None if may_be_null and number % 2 else by_type[of]
        for name, (of, may_be_null) in column_types(kind).items()
    }
    return kind(**found | values)


def episode(number: int = 1, **values: Any) -> EpisodeRow:
    return made(EpisodeRow, number, **values)


def call(name: str, parent: str | None = None, tokens: int = 1, **values: Any) -> Call:
    return Call(
        call_id=name,
        parent_id=parent,
        new_prompt=pack_ids([1, 2]),
        sampled=pack_ids([3] * tokens),
        logprobs=pack_logprobs([-0.5] * tokens),
        stop_reason="stop",
        policy_version=4,
        **values,
    )


OWN = "WHERE name NOT IN ('version', 'inode') "
"""Facts but the ledger's own."""


async def rows_in(ledger: Ledger, kind: type[Row]) -> list[Row]:
    """All but the ledger's own, in the order of their key or of their writing."""
    rest = OWN if kind is FactRow else ""
    return await ledger.rows(kind, f"{rest}ORDER BY {', '.join(kind.KEY) or 'number'}")


LARGE_BYTES = 300 * 2**10
"""Of an episode that `put_large` makes, a third in each table."""


async def put_large(
    ledger: Ledger,
    *numbers: int,
    step: Callable[[int], int] = lambda number: 1,
    size: int = LARGE_BYTES,
    with_episode: bool = True,
    **values: Any,
) -> None:
    """Commit consumed episodes, each of which trained in its step, with so many bytes."""
    for number in numbers:
        if with_episode:
            ledger.put(ended_episode(number, **values))
        part = FRAME_HEADER + bytes(size // 3 - len(FRAME_HEADER))  # Frames are stored as they are.
        ledger.put(TrainedRow(episode=number, step=step(number), outcome=Use.TRAINED))
        ledger.put(made(CallRow, 1, episode=number, attempt=1, call=part))
        ledger.put(TokensRow(episode=number, step=step(number), sequences=part))
        ledger.put(TranscriptRow(episode=number, attempt=1, transcript=part))
    await ledger.durable()


async def full(ledger: Ledger) -> list[int]:
    """The episodes that have all of their bytes; the others have none."""
    query = (
        "SELECT sequence, emptied, length(call), length(sequences), length(transcript) FROM {s}episodes "
        "JOIN {s}calls AS c ON c.episode = sequence JOIN {s}tokens AS t ON t.episode = sequence "
        "JOIN {s}transcripts AS s ON s.episode = sequence ORDER BY sequence"
    )
    found = await ledger.read(query)
    assert all(bool(emptied) == (sum(sizes) == 0) == (0 in sizes) for _, emptied, *sizes in found)
    return [number for number, emptied, *_ in found if not emptied]


async def names_of(ledger: Ledger, *claims: tuple[int, int]) -> list[list[str]]:
    return [[each.call_id for each in calls] for calls in await ledger.calls(claims)]


MESSAGES = json.dumps([{"role": "user", "content": "What is 12+34? Answer with a number and nothing else."}])


async def put_calls(ledger: Ledger, calls: list[Call]) -> None:
    ledger.put(episode())
    for each in calls:
        ledger.put_call(1, 1, each)
    await ledger.durable()


async def trained_once(ledger: Ledger) -> None:
    """Return when the ledger has a dictionary."""

    async def has_one() -> bool:
        return len(await ledger.read(DICTIONARIES)) == 1

    await eventually(has_one, "a dictionary")


TWICE: list[tuple[Row, Row]] = [
    (made(PublicationRow, 7), made(PublicationRow, 7, step=9)),
    (made(StepRow, 7), made(StepRow, 7, policy_version=9)),
    (made(TrainedRow, 1), made(TrainedRow, 1, outcome="stale", place=9)),
    (made(EvaluationRow, 7), made(EvaluationRow, 7, accepted=9)),
    (made(ResumptionRow, 7), made(ResumptionRow, 7, step=9)),
    (episode(7, end_number=3), episode(8, end_number=3)),
    (episode(7, uuid="u"), episode(8, uuid="u")),
]
"""What happens once, and another row that says that it happened again."""


class LedgerContract:
    """One test for each promise."""

    async def test_rows_of_every_kind_survive(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        # Each text in a row with nulls, which odd numbers make, and in one without.
        texts = list(enumerate([*TEXTS, "", *TEXTS], 1))
        written = {kind: [made(kind, number, text) for number, text in texts] for kind in TABLES}
        await ledger.commit(row for kind in reversed(TABLES) for row in written[kind])
        again = reopen()
        for kind in TABLES:
            found = await again.rows(kind, OWN if kind is FactRow else "")
            assert {astuple(row) for row in found} == {astuple(row) for row in written[kind]}
        query = "SELECT sequence FROM {s}episodes WHERE uuid = ? AND group_id = ? AND digest = ?"
        for row in written[EpisodeRow]:
            assert await again.read(query, (row.uuid, row.group_id, row.digest)) == [(row.sequence,)]

    async def test_the_last_row_with_a_key_replaces_the_others(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        rows = [episode(1, state=state, pool="p") for state in ("registered", "claimed", "ended", "failed")]
        ledger.put(rows[0])
        await ledger.commit(rows[:2])
        assert await rows_in(ledger, EpisodeRow) == [rows[1]]
        ledger.put(rows[2])
        await ledger.commit([rows[3]])
        assert await rows_in(ledger, EpisodeRow) == [rows[3]]
        first, other = made(SampleRow, 1), made(SampleRow, 1, payload=b"other")
        for written in ([first, other], [other]):
            await ledger.commit(written)
            assert await rows_in(ledger, SampleRow) == [first], "of samples with a digest the first one stays"

    @pytest.mark.parametrize(
        ("first", "second", "at_once"),
        [*((*pair, False) for pair in TWICE), (*TWICE[0], True), (*TWICE[-1], True)],
        ids=lambda value: type(value).__name__ if isinstance(value, Row) else str(value),
    )
    async def test_what_happens_once_cannot_happen_twice(
        self, reopen: Reopen, first: Row, second: Row, at_once: bool
    ) -> None:
        ledger = await leading(reopen)
        await ledger.commit([episode(1), *([] if at_once else [first])])
        before = await rows_in(ledger, type(first))
        ledger.put(made(SampleRow, 1))
        with pytest.raises(StoreError):
            await ledger.commit([first, second] if at_once else [second])
        with pytest.raises(StoreError):
            ledger.put(made(SampleRow, 2))
        again = reopen()
        assert await rows_in(again, type(first)) == before
        assert await rows_in(again, SampleRow) == [], "all of a transaction or nothing"

    async def test_what_was_undone_may_happen_again(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        kinds = [kind for kind in UNDONE if kind is not PublicationRow]
        for undone in (1, 2, 0):
            await ledger.commit([episode(1), *(made(kind, 1, undone=undone) for kind in kinds)])
        assert [len(await rows_in(ledger, kind)) for kind in kinds] == [3] * len(kinds)

    async def test_a_resumption_undoes_the_rows_of_later_steps(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        await ledger.commit(map(episode, (1, 2, 3)))
        await ledger.commit(
            made(kind, number, step=number, undone=0) for kind in UNDONE for number in (1, 2, 3)
        )
        aside = made(TrainedRow, 1, step=3, role="", outcome=Use.SET_ASIDE, undone=0)
        await ledger.commit([aside])
        found = (await begin(ledger, [1, 2], time=1.0)).history
        await ledger.durable()
        assert (found.step, found.resumption) == (2, 1)
        for kind in UNDONE:
            rows = await ledger.read(f"SELECT step FROM {{s}}{kind.TABLE} WHERE undone = 1")
            assert rows == [(3,)], kind
        assert aside in await rows_in(ledger, TrainedRow), "what is misaligned stays so"

    async def test_a_resumption_knows_what_was_judged_and_which_evaluations_are_not_over(
        self, reopen: Reopen
    ) -> None:
        ledger = await leading(reopen)
        await ledger.commit(map(ended_episode, range(1, 7)))
        labels = {7: ("before", 0), 8: ("step-1", 1), 9: ("step-2", 2), 10: ("step-2", 2), 11: ("step-3", 3)}
        await ledger.commit(
            ended_episode(number, episode_type="eval", position=-1, label=label, step=step)
            for number, (label, step) in labels.items()
        )
        for label, step, undone, at in (("step-1", 1, 0, 2.0), ("step-2", 2, 1, 3.0), ("before", 0, 0, 1.0)):
            await ledger.commit([made(EvaluationRow, step, label=label, step=step, time=at, undone=undone)])
        trained = {1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (4, 0), 5: (2, 1)}
        await ledger.commit(
            made(TrainedRow, number, step=step, undone=undone, role="", outcome=Use.STALE, place=-1)
            for number, (step, undone) in trained.items()
        )
        await ledger.commit(
            VerdictRow(episode=number, reward=None if number == 6 else number / 2, time=1.0)
            for number in range(1, 7)
        )
        await ledger.commit(made(StepRow, step, undone=0) for step in (1, 2, 3, 4))
        await ledger.commit(made(CheckpointRow, step, undone=0) for step in (1, 2, 3))
        found = await find_beginning(ledger, [1, 2, 3, 4])
        history = found.history
        assert (history.step, history.interrupted) == (3, [2])
        assert [(row.label, row.step) for row in history.evaluations] == [("before", 0), ("step-1", 1)]
        assert (history.verdicts, found.used) == ({4: 2.0, 5: 2.5}, {4: Use.STALE})
        assert (await find_beginning(ledger, [1, 2])).history.verdicts == {3: 1.5, 4: 2.0, 5: 2.5}
        again = (await find_beginning(ledger, [3], replay_lag=1)).history
        assert (again.verdicts, again.replayed) == ({3: 1.5, 4: 2.0, 5: 2.5}, [])
        with pytest.raises(
            ConfigError, match="ends with step 4, before the checkpoint of step 5: it was trunc"
        ):
            await find_beginning(ledger, [1, 5])

    async def test_each_episode_counts_once(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        given: list[dict[str, Any]] = [
            *({}, {"step": 2}, {"step": 0, "pool": "me"}, {"episode_type": "eval"}),
            {"state": "failed", "failure": "boom"},
            {"state": "failed", "failure": "cancelled", "episode_type": "eval"},
            *({"state": "registered", "consumed": 0}, {"state": "claimed", "consumed": 0, "pool": "me"}),
            *({"consumed": 0}, {"consumed": 0}, {"undone": 1}),
        ]
        await ledger.commit(ended_episode(number, **each) for number, each in enumerate(given, start=1))
        failures: dict[tuple[int, int], str] = {(1, 1): "{}", (1, 2): "{}", (2, 1): "{}", (5, 1): "{}"}
        claims = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (5, 1)]
        await ledger.commit(claim(*each, failure=failures.get(each)) for each in claims)
        uses = [
            *((1, 1, Use.LEFT_OUT, ""), (1, 2, Use.LEFT_OUT, ""), (2, 1, Use.SET_ASIDE, "judge")),
            *((3, 1, Use.STALE, ""), (4, 1, Use.EVALUATED, ""), (5, 1, Use.LEFT_OUT, "")),
        ]
        await ledger.commit(
            TrainedRow(episode=number, step=step, outcome=outcome, role=role)
            for number, step, outcome, role in uses
        )
        await ledger.commit([TrainedRow(episode=9, step=1, outcome=Use.STALE, undone=1)])
        ended = {"train_accepted": 6, "planned_accepted": 5, "eval_accepted": 1, "failed": 1, "cancelled": 1}
        assert await tally(ledger) == Tally(**ended, retries=3, left_out=3, lost=3)

    async def test_a_group_is_replayed_in_one_order_whatever_step_used_it(self, reopen: Reopen) -> None:
        """A replay buffer knows a group by its episodes in order, and counts in how many steps it trained."""
        ledger = await leading(reopen)
        await ledger.commit(map(episode, (1, 2, 3)))
        for step, order in ((1, (3, 1, 2)), (2, (2, 3, 1))):
            await ledger.commit(
                made(TrainedRow, number, step=step, role="", place=0, undone=0) for number in order
            )
        await ledger.commit([made(CheckpointRow, 2, undone=0), made(StepRow, 2, undone=0)])
        found = (await find_beginning(ledger, [2], replay_lag=2)).history
        assert [(row.step, row.episode) for row in found.replayed] == [
            (step, number) for step in (1, 2) for number in (1, 2, 3)
        ]
        for replay_lag, steps in ((1, {2}), (0, set[int]())):
            found = (await find_beginning(ledger, [2], replay_lag=replay_lag)).history
            assert {row.step for row in found.replayed} == steps
        assert (await find_beginning(ledger, [2])).history.replayed == []

    async def test_over_the_limit_the_oldest_lose_their_bytes_and_the_rows_stay(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        await put_large(ledger, 2, end_number=3)
        await put_large(ledger, 3, end_number=2)
        await put_large(ledger, 1, end_number=1, consumed=0)
        await put_large(ledger, 4, 5, step=lambda number: 2)
        await ledger.commit(made(CheckpointRow, step, undone=0) for step in (1, 2))
        before = {kind: len(await rows_in(ledger, kind)) for kind in TABLES}
        storage = StorageLimit(ledger, 1)
        await storage.keep()
        again = reopen()
        assert await full(again) == [1, 4, 5]
        assert {kind: len(await rows_in(again, kind)) for kind in TABLES} == before
        assert await ledger.calls([(2, 1)]) == [[]]
        await put_large(ledger, 6, end_number=9)
        await ledger.commit([made(CheckpointRow, 3, undone=0)])
        await storage.keep()
        assert await full(ledger) == [1, 5, 6], "no more than had to go"

    async def test_a_row_of_an_unknown_episode_is_refused(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        with pytest.raises(StoreError):
            await ledger.commit([made(TrainedRow, 1)])

    async def test_what_is_not_committed_is_not_visible(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ledger = await leading(reopen)
        write = ledger.write
        before: list[object] = []

        async def look_and_write(batch: WriteBatch) -> None:
            before.extend([await rows_in(reopen(), EpisodeRow), await names_of(ledger, (1, 1))])
            await write(batch)

        monkeypatch.setattr(ledger, "write", look_and_write)
        ledger.put(episode())
        ledger.put_call(1, 1, call("a"))
        await ledger.durable()
        assert before == [[], [[]]]
        assert await rows_in(reopen(), EpisodeRow) == [episode()]
        assert await names_of(ledger, (1, 1)) == [["a"]]

    async def test_calls_keep_their_order_and_their_claim(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        ledger.note([episode(1), episode(2)])
        for number in range(3):
            ledger.put_call(1, 1, call(f"one-{number}"))
        ledger.put_call(1, 2, call("two", parent="x"))
        ledger.put_call(2, 1, call("other"))
        spans = [(4, 0), (6, 2)]
        flown = call("flown", tokens=3, policy_version_end=6, spans=spans, role="judge", created=7)
        ledger.put_call(2, 2, flown)
        await ledger.durable()
        ledger.put_call(1, 1, call("one-3"))
        await ledger.close()
        again = await leading(reopen)
        assert await again.calls([(1, 2), (2, 2)]) == [[call("two", parent="x")], [flown]]
        stored = await again.rows(CallRow, "ORDER BY number")
        versions = [(row.policy_version, row.last_version) for row in stored]
        assert versions == [(4, 4)] * 5 + [(4, 6)] + [(4, 4)]
        last = stored[5]
        assert (last.prompt_tokens, last.sampled_tokens, last.stop_reason) == (2, 3, "stop")
        assert (last.role, last.created) == ("judge", 7)
        names = await names_of(again, (2, 1), (1, 1), (1, 3))
        assert names == [["other"], [f"one-{number}" for number in range(4)], []]

    async def test_an_image_is_stored_once_and_read_with_its_calls(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        ledger.note([episode(1), episode(2)])
        files = [ANY_BYTES * 40, *(b"%d" % number for number in range(2500))]
        images = [PlacedImage(number, file) for number, file in enumerate(files)]
        seeing = [msgspec.structs.replace(call(name), images=images) for name in "abc"]
        for number, each in enumerate(seeing):
            ledger.put_call(1 + number % 2, 1, each)
        ledger.put_call(2, 1, call("text"))
        await ledger.close()
        again = await leading(reopen)
        one, other = await again.calls([(1, 1), (2, 1)])
        assert one == [seeing[0], seeing[2]]
        assert other == [seeing[1], call("text")]
        stored = await again.rows(ImageRow)
        assert sorted(bytes(row.file) for row in stored) == sorted(files)
        assert all(row.size < 200_000 for row in await again.rows(CallRow))
        assert ANY_BYTES not in b"".join(unpacked(bytes(row.call)) for row in await again.rows(CallRow))

    async def test_a_dictionary_compresses_calls_also_after_a_restart(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        sent = [call(f"call-{number}", messages=MESSAGES) for number in range(DICTIONARY_BLOBS + 20)]
        await put_calls(ledger, sent[:DICTIONARY_BLOBS])
        await trained_once(ledger)
        await put_calls(ledger, sent[DICTIONARY_BLOBS:-10])
        await ledger.close()
        again = await leading(reopen)
        await put_calls(again, sent[-10:])
        assert await again.calls([(1, 1)]) == [sent]
        sizes = [len(row.call) for row in await again.rows(CallRow, "ORDER BY number")]
        assert max(sizes[DICTIONARY_BLOBS:]) < min(sizes[:DICTIONARY_BLOBS]) / 2
        assert len(await again.read(DICTIONARIES)) == 1, "the second process has found the first one's"

    async def test_no_frame_is_written_before_its_dictionary(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or a process that dies in between would leave calls that cannot be read."""
        ledger = await leading(reopen)
        write, known, named = ledger.write, set[int](), set[int]()

        async def looked_at(batch: WriteBatch) -> None:
            facts: Any = batch.rows.get(FactRow, {}).values()
            calls: Any = batch.rows.get(CallRow, {}).values()
            known.update(int(row.name.rpartition("/")[2]) for row in facts)
            frames = [row.call for row in calls if row.call.startswith(FRAME_HEADER)]
            named.update(get_frame_parameters(each).dict_id for each in frames)
            assert named <= known
            await write(batch)

        monkeypatch.setattr(ledger, "write", looked_at)
        ledger.put(episode())
        number = 0
        while not named:
            ledger.put_call(1, 1, call(f"call-{number}", messages=MESSAGES))
            await asyncio.sleep(0)
            number += 1
        await ledger.durable()

    async def test_statements_run_after_the_rows_of_their_transaction(self, reopen: Reopen) -> None:
        """So calls that are dropped at once are never there."""
        ledger = await leading(reopen)
        ledger.put(episode())
        ledger.execute("DELETE FROM {s}calls WHERE episode = ? AND attempt = ?", 1, 1)
        ledger.put_call(1, 1, call("a"))
        ledger.put_call(1, 2, call("b"))
        ledger.execute("UPDATE {s}episodes SET pool = ? WHERE uuid = ?", "a\0\x01%s", episode().uuid)
        await ledger.durable()
        assert await names_of(ledger, (1, 1), (1, 2)) == [[], ["b"]]
        assert await rows_in(ledger, EpisodeRow) == [episode(pool="a\0\x01%s")]

    async def test_much_at_once_survives(self, reopen: Reopen) -> None:
        """More rows, and more bytes, than are written on the event loop or in one message."""
        ledger, long = await leading(reopen), call("long", tokens=200_000)
        episodes = [episode(number) for number in range(1, 3001)]
        sample = made(SampleRow, 1, payload=ANY_BYTES * 40_000)
        ledger.note([sample, *episodes])
        for _ in range(5):
            ledger.put_call(1, 1, long)
        await ledger.durable()
        again = reopen()
        assert await rows_in(again, EpisodeRow) == episodes
        assert await rows_in(again, SampleRow) == [sample]
        assert await again.calls([(1, 1)]) == [[long] * 5]

    async def test_what_comes_together_shares_a_transaction(
        self, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ledger = await leading(reopen)
        write, written = ledger.write, list[list[int]]()

        async def noted(batch: WriteBatch) -> None:
            written.append([row.sequence for row in batch.rows[EpisodeRow].values()])  # type: ignore[attr-defined]
            if len(written) == 1:
                ledger.put(episode(4))
                await asyncio.sleep(0)
                ledger.put(episode(5))
            await write(batch)

        monkeypatch.setattr(ledger, "write", noted)
        ledger.note([episode(1), episode(2)])
        await asyncio.sleep(0)
        ledger.put(episode(3))
        await ledger.durable()
        await ledger.durable()
        assert written == [[1, 2, 3], [4, 5]]

    async def test_callbacks_run_in_order_after_their_commit_and_before_its_waiters(
        self, reopen: Reopen
    ) -> None:
        ledger, ran = await leading(reopen), list[str]()
        ledger.after_commit(lambda: ran.append("before any row"))
        ledger.put(episode(1))
        ledger.after_commit(lambda: ran.append("one"))
        ledger.put(episode(2))
        ledger.after_commit(lambda: ran.append("two"))
        assert not ran, "never before it returns"
        await ledger.durable()
        assert ran == ["before any row", "one", "two"]
        await ledger.durable()

    async def test_a_commit_that_fails_fails_everything_after_it(self, reopen: Reopen) -> None:
        ledger, ran = await leading(reopen), list[str]()
        await ledger.commit([episode(1)])
        watching = asyncio.ensure_future(ledger.failed())
        ledger.note([episode(2, uuid=episode(1).uuid), episode(3)])
        ledger.after_commit(lambda: ran.append("never"))
        with pytest.raises(StoreError) as failed:
            await ledger.durable()
        for late in (lambda: ledger.put(episode(4)), lambda: ledger.after_commit(lambda: None)):
            with pytest.raises(StoreError):
                late()
        with pytest.raises(StoreError) as seen:
            await watching
        assert seen.value is failed.value
        assert ran == []
        assert await rows_in(reopen(), EpisodeRow) == [episode(1)]

    async def test_a_waiter_that_is_cancelled_harms_nobody(self, reopen: Reopen) -> None:
        ledger = await leading(reopen)
        ledger.put(episode())
        impatient = asyncio.ensure_future(ledger.durable())
        patient = asyncio.ensure_future(ledger.durable())
        await asyncio.sleep(0)
        impatient.cancel()
        await patient
        assert await rows_in(reopen(), EpisodeRow) == [episode()]
