"""What the page shows of a run: each view over a small record."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from record_helpers import episode, said, trained_sequence
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.lifecycle import ProcessId
from tinkerscript.page import lines as lines_module
from tinkerscript.page.curves import alignment_view, found_in
from tinkerscript.page.episode_view import episode_view, find_episode
from tinkerscript.page.held_out import ComparisonQuery, compare
from tinkerscript.page.lines import EpisodeLine, newest, search
from tinkerscript.page.overview import overview, run_line, state
from tinkerscript.page.runs import Runs
from tinkerscript.page.steps import step_view
from tinkerscript.page.token_view import pieces, token_view
from tinkerscript.record.entries import TokenUse, TrainedEpisode
from tinkerscript.record.health import Gain, health_rows
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    with RecordWriter(tmp_path / RECORD_FILE) as writer:
        yield writer
        assert (writer.failure, writer.dropped) == ("", 0)


def flushed(writer: RecordWriter, folder: Path) -> Record:
    assert writer.flush()
    return Record(folder)


def uuids(episodes: list[EpisodeLine]) -> list[str]:
    return [each.uuid for each in episodes]


SAMPLES = [{"id": f"s{i}", "input": f"What is {i}+1?", "target": str(i + 1)} for i in range(4)]


def write_evaluation(writer: RecordWriter, label: str, step: int, rewards: dict[int, list[float]]) -> None:
    """`rewards`: sample -> those of its episodes."""
    for sample, each in rewards.items():
        for number, reward in enumerate(each):
            writer.episode(
                episode(
                    f"{label}-{sample}-{number}",
                    episode_type="eval",
                    step=step,
                    label=label,
                    group_id=f"eval-{label}/sample-{sample}",
                    sample=SAMPLES[sample],
                    reward=reward,
                    detail={"calls": [said(None, [1], [2], "q", "a", policy_version=step)]},
                )
            )
    every = [reward for each in rewards.values() for reward in each]
    score = sum(every) / len(every)
    writer.evaluation(label=label, step=step, policy_version=step, score=score, accepted=len(every), failed=0)


def test_what_a_resumed_run_took_back_is_in_no_group_and_no_score(
    writer: RecordWriter, tmp_path: Path
) -> None:
    for uuid, reward in (("old1", 0.0), ("old2", 0.0)):
        writer.episode(episode(uuid, step=2, group_id="step-2/sample-0", reward=reward))
    write_evaluation(writer, "before", 0, {0: [1.0]})
    writer.episode(episode("cut", episode_type="eval", label="after", step=1, sample=SAMPLES[0], reward=0.0))
    writer.resume(1, kept={"kept"})
    write_evaluation(writer, "after", 1, {0: [1.0]})
    for uuid in ("new1", "new2"):
        writer.episode(episode(uuid, step=2, group_id="step-2/sample-0", reward=1.0))
    write_step(writer, 2)
    record = flushed(writer, tmp_path)
    step = step_view(record, 2)
    assert [uuids(group.episodes) for group in step.groups] == [["new1", "new2"]]
    assert (step.undone, step.groups[0].mean_reward) == (2, 1.0)
    assert uuids(episode_view("r", record, "new1").siblings) == ["new1", "new2"]
    old = episode_view("r", record, "old1")
    assert (uuids(old.siblings), old.line.undone) == (["old1", "old2"], 1)
    assert uuids(search(record, "undone>0").episodes) == ["cut", "old2", "old1"]
    assert [change.after for change in compare(record, ComparisonQuery()).samples] == [1.0]


def write_step(writer: RecordWriter, step: int, **columns: Any) -> None:
    given = {"policy_version": step, "reward": 0.5, "accepted": 4, "failed": 1, "trained": 2, "max_lag": 0}
    writer.step(step, **given | columns)


def write_group(
    writer: RecordWriter, step: int, number: int, rewards: list[float | None], **more: Any
) -> None:
    """Episodes `step.number.i`; None: one that failed."""
    for i, reward in enumerate(rewards):
        failed: dict[str, Any] = {
            "status": "failed",
            "reward": None,
            "detail": {"calls": [], "failures": [{"kind": "timeout", "message": "late", "attempt": 1}]},
        }
        fields = {
            "step": step,
            "group_id": f"step-{step}/sample-{number}",
            "sample": SAMPLES[number % len(SAMPLES)],
            **({"reward": reward} if reward is not None else failed),
            **more,
        }
        writer.episode(episode(f"{step}.{number}.{i}", **fields))


# The first screen


def test_the_first_screen_of_a_run_that_goes_on(writer: RecordWriter, tmp_path: Path) -> None:
    writer.status(
        state="running",
        process=ProcessId.own(),
        method="grpo",
        model="tiny",
        tasks=["sums"],
        step=2,
        steps=10,
        began=100.0,
        waiting_for="step 3",
        waiting_since=150.0,
        phase={"label": "step 3", "done": 5, "total": 16, "time": 1.0},
        recording="all",
    )
    write_evaluation(writer, "before", 0, {0: [0.0], 1: [1.0]})
    write_group(writer, 1, 0, [1.0, 0.0, None])
    for step in (1, 2):
        write_step(writer, step)
        writer.metrics(
            step,
            {
                "reward/mean": step / 4,
                "episodes/accepted": 4.0,
                "episodes/failed": 1.0,
                "episodes/retried": 2.0,
                "episodes/stale": 1.0,
                "groups/trained": 3.0,
                "groups/same_reward": 2.0,
                "groups/dropped": 1.0,
                "failure/timeout": 1.0,
                "alignment/calls": 10.0,
                "response_tokens/cut_off": 0.2,
                "alignment/max_abs_dlogp": 0.01 * step,
            },
        )
    write_evaluation(writer, "step-2", 2, {0: [1.0], 1: [1.0]})
    writer.finding(step=2, kind="finding", name="logprob_gap", detail="d", episode="", count=1)
    writer.finding(step=2, kind="error", name="prompt_empty", detail="", episode="1.0.0", count=3)
    writer.finding(step=2, kind="warning", name="constrained", detail="", episode="1.0.0", count=9)
    writer.note("first")
    writer.note("second")
    view = overview("run", flushed(writer, tmp_path))
    assert (view.name, view.state, view.method, view.model, view.tasks) == (
        "run",
        "running",
        "grpo",
        "tiny",
        ["sums"],
    )
    assert (view.step, view.steps, view.policy_version, view.episodes) == (2, 10, 2, 7)
    assert (view.score_before, view.score, view.reward) == (0.5, 1.0, 0.5)
    assert view.waiting is not None
    assert (view.waiting.what, view.waiting.since) == ("step 3", 150.0)
    assert view.phase is not None
    assert (view.phase.label, view.phase.done, view.phase.total) == ("step 3", 5, 16)
    assert [each.label for each in view.evaluations] == ["before", "step-2"]
    assert [note.text for note in view.notes] == ["second", "first"]
    assert uuids(view.newest)[:3] == ["step-2-1-0", "step-2-0-0", "1.0.2"]
    health = view.health
    assert (health.episodes, health.failed, health.retried) == (8, 2, 4)
    rows = {row.name: row for row in health.rows}
    assert {name: row.value for name, row in rows.items()} == {
        **{"held_out": "0.500 → 1.000", "reward": "0.250 → 0.500", "equal": "4 of 12 (33%)"},
        **{"cut_off": "20%", "failed": "2 of 10 (20%)", "stale": "2", "mismatch": "2.0e-02"},
    }
    bad = {name for name, row in rows.items() if row.kind == "bad"}
    assert (bad, rows["cut_off"].kind) == ({"failed", "mismatch"}, "warn")
    assert health.verdict == "needs attention: failed episodes, trainer–sampler mismatch"
    (failure,) = health.failures
    assert (failure.kind, failure.count) == ("timeout", 2)
    assert failure.example is not None
    assert failure.example.uuid == "1.0.2"
    assert run_line("run", Record(tmp_path)) == run_line("run", Record(tmp_path)).model_validate(
        {name: getattr(view, name) for name in type(run_line("run", Record(tmp_path))).model_fields}
    )


def test_one_evaluation_is_no_gain(writer: RecordWriter, tmp_path: Path) -> None:
    write_evaluation(writer, "before", 0, {0: [0.0], 1: [1.0]})
    line = run_line("run", flushed(writer, tmp_path))
    assert (line.score_before, line.score) == (None, 0.5)


@pytest.mark.parametrize(
    ("steps", "ended", "about"),
    [
        (10, [80.0, 30.0], 370.0),
        (10, [140.0, 90.0], 350.0),
        (10, [200.0, 150.0], None),
        (2, [60.0, 10.0], None),
    ],
)
def test_the_time_left_is_known_between_steps_of_a_usual_length(
    writer: RecordWriter, tmp_path: Path, steps: int, ended: list[float], about: float | None
) -> None:
    """Steps of 50 s; `ended`: seconds ago."""
    writer.status(state="running", process=ProcessId.own(), step=2, steps=steps, began=100.0)
    for step in (1, 2):
        write_step(writer, step)
    record = flushed(writer, tmp_path)
    with sqlite3.connect(tmp_path / RECORD_FILE) as database:
        for step, ago in enumerate(ended, 1):
            database.execute("UPDATE steps SET time = ? WHERE step = ?", (time.time() - ago, step))
    left = overview("run", record).time_left_s
    assert left == (None if about is None else pytest.approx(about, abs=20))


@pytest.mark.parametrize(
    ("config", "longest", "advice"),
    [
        ({"sampling": {"max_tokens": 16}}, 16.0, "raise sampling.max_tokens (16), or"),
        (
            {"sampling": {"max_tokens": 16}},
            8.0,
            "at 8 tokens, not by sampling.max_tokens (16): raise the task's",
        ),
        ({}, 8.0, "raise sampling.max_tokens, or the task's own max_tokens, or"),
    ],
)
def test_what_cuts_replies_off_is_named(
    writer: RecordWriter, tmp_path: Path, config: dict[str, Any], longest: float, advice: str
) -> None:
    writer.status(config=config)
    write_step(writer, 1)
    cut = {"alignment/calls": 10.0, "response_tokens/cut_off": 0.6, "response_tokens/max": longest}
    writer.metrics(1, cut)
    (row,) = (row for row in health_rows(flushed(writer, tmp_path)) if row.name == "cut_off")
    assert row.words.startswith(advice)


def test_a_trainer_that_is_gone_without_a_word_was_stopped() -> None:
    host, pid, started = ProcessId.own()
    assert state({"state": "running", "process": [host, pid, started]}) == "running"
    assert state({"state": "running", "process": [host, pid, started - 1]}) == "stopped"
    assert state({"state": "running", "process": [f"{host}-other", pid, started - 1]}) == "running"
    assert state({"state": "finished", "process": [host, pid, started - 1]}) == "finished"


# Curves


# Steps


def test_a_step_has_its_groups_in_order_and_its_neighbors(writer: RecordWriter, tmp_path: Path) -> None:
    for step in (1, 2, 4):
        write_step(writer, step)
    write_group(writer, 2, 10, [1.0, 0.0])
    write_group(writer, 2, 9, [1.0, 1.0])
    write_group(writer, 1, 8, [0.0])
    write_evaluation(writer, "step-2", 2, {0: [1.0]})
    writer.trained(
        2,
        [
            TrainedEpisode(uuid="2.10.0", outcome="trained", advantage=0.5),
            TrainedEpisode(uuid="2.10.1", outcome="trained", advantage=-0.5),
            TrainedEpisode(uuid="2.9.0", outcome="same_reward", advantage=0.0),
        ],
    )
    writer.metrics(2, {"reward/mean": 0.75, "eval/score": 1.0})
    view = step_view(flushed(writer, tmp_path), 2)
    assert [group.group_id for group in view.groups] == ["step-2/sample-9", "step-2/sample-10"]
    assert [group.mean_reward for group in view.groups] == [1.0, 0.5]
    assert [(e.uuid, e.advantage, e.outcome) for e in view.groups[1].episodes] == [
        ("2.10.0", 0.5, "trained"),
        ("2.10.1", -0.5, "trained"),
    ]
    assert [e.outcome for e in view.groups[0].episodes] == ["same_reward", None]
    assert view.metrics == {"reward/mean": 0.75}
    assert [(bar.low, bar.count) for bar in view.histogram] == [(0.0, 1), (1.0, 3)]
    assert (view.previous_step, view.next_step, view.line.policy_version) == (1, 4, 2)
    assert (view.groups_found, view.next) == (2, None)


# Lists of episodes


def test_lists_of_episodes_are_filtered_and_paged(
    writer: RecordWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "FIRST_ROWS", 2)
    monkeypatch.setattr(lines_module, "SCAN_ROWS", 3)
    for number in range(20):
        failed = number % 5 == 0
        cut = said(None, [1], [2], "q", "a", stop_reason="length" if number % 4 == 0 else "stop")
        status = "failed" if failed else "accepted"
        writer.episode(
            episode(f"e{number}", status=status, reward=None if failed else 1.0, detail={"calls": [cut]})
        )
    writer.trained(
        1, [TrainedEpisode(uuid="e1", outcome="trained"), TrainedEpisode(uuid="e2", outcome="stale")]
    )
    record = flushed(writer, tmp_path)

    def pages(show: str, limit: int) -> list[list[str]]:
        found, before = [], None
        while True:
            page = newest(record, show=show, before=before, limit=limit)
            found.append([uuid[1:] for uuid in uuids(page.episodes)])
            if page.next is None:
                return found
            before = page.next

    assert pages("failed", 3) == [["15", "10", "5"], ["0"]]
    assert pages("truncated", 4) == [["16", "12", "8", "4"], ["0"]]
    assert pages("trained", 5) == [["1"]]
    assert pages("untrained", 5) == [["2"]]
    everything = pages("all", 7)
    assert [*chain.from_iterable(everything)] == [str(number) for number in range(19, -1, -1)]
    assert len([*chain.from_iterable(pages("accepted", 50))]) == 16


# Held-out samples


def test_two_evaluations_are_compared_sample_by_sample(writer: RecordWriter, tmp_path: Path) -> None:
    write_evaluation(writer, "before", 0, {0: [0.0, 0.0], 1: [1.0], 2: [0.5], 3: [1.0]})
    write_evaluation(writer, "step-5", 5, {0: [1.0, 0.0], 1: [0.25], 2: [0.5]})
    write_evaluation(writer, "after", 9, {0: [0.0], 1: [1.0], 2: [1.0]})
    record = flushed(writer, tmp_path)
    whole = compare(record, ComparisonQuery())
    assert (whole.before.label, whole.after.label) == ("before", "after")
    assert (whole.better, whole.worse, whole.same) == (1, 0, 3)
    found = compare(record, ComparisonQuery(before="before", after="step-5"))
    assert (found.better, found.worse, found.same) == (1, 1, 2)
    changes = [(c.id, c.before, c.after, c.change) for c in found.samples]
    assert changes == [
        ("s1", 1.0, 0.25, "worse"),
        ("s0", 0.0, 0.5, "better"),
        ("s2", 0.5, 0.5, "same"),
        ("s3", 1.0, None, "same"),
    ]
    assert (found.samples[0].before_uuid, found.samples[0].after_uuid) == ("before-1-0", "step-5-1-0")
    assert found.samples[0].input == "What is 1+1?"
    assert found.samples[3].after_uuid is None
    # Over samples 0 to 2, which both have: changes of 0.5, -0.75 and 0.
    assert found.gain is not None
    assert found.gain.model_dump() == pytest.approx(
        {"mean": -1 / 12, "margin": 0.71196, "samples": 3}, abs=1e-5
    )
    assert compare(record, ComparisonQuery(after="before")).gain == Gain(mean=0, margin=0, samples=4)
    assert overview("run", record).gain == whole.gain
    assert [c.id for c in compare(record, ComparisonQuery(after="step-5", show="better")).samples] == ["s0"]
    with pytest.raises(NotRecordedError, match="no evaluation 'nope'; it has before, step-5, after"):
        compare(record, ComparisonQuery(before="nope"))


# An episode


def test_an_episode_has_its_turns_its_fork_and_its_failed_attempt(
    writer: RecordWriter, tmp_path: Path
) -> None:
    one = said(None, [1, 2], [3, 4], "Q1", "A1", tools='[{"name": "calc"}]')
    two = said(one, [5], [6, 7], "Q2", "A2", policy_version_end=2, temperature=0.5)
    fork = said(one, [8, 9], [10], "Q3", "A3", fork_reason="a message was edited", stop_reason="length")
    failed = said(None, [1], [2, 3], "Q1", "half")
    detail = {
        "calls": [one, two, fork],
        "failed_calls": {1: [failed]},
        "failures": [{"attempt": 1, "client_uuid": "w0", "kind": "timeout", "message": "too slow"}],
        "metadata": {
            "scores": {"exact": 1, "style": "good"},
            "explanations": {"exact": {"answer": "2", "explanation": "equal"}},
            "other": [1],
        },
        "log_metrics": {"turns": 3.0},
    }
    writer.episode(episode("a", group_id="g"))
    writer.episode(episode("b", group_id="g", attempt=2, queued_s=1.5, detail=detail))
    writer.episode(episode("c", group_id="h"))
    sequences = [
        trained_sequence(0, 4, uses=bytes([TokenUse.TRAINED, TokenUse.CONSTRAINED, 0, 0])),
        trained_sequence(1, 3, uses=bytes([TokenUse.LEFT_OUT]), reason="prompt_empty"),
    ]
    for step, advantage in ((1, 0.5), (3, 0.25)):
        trained = TrainedEpisode(uuid="b", outcome="trained", advantage=advantage, sequences=sequences)
        writer.trained(step, [trained])
    view = episode_view("run", flushed(writer, tmp_path), "b")
    assert (view.run, view.line.uuid, view.recorded, view.transcripts) == ("run", "b", True, [])
    assert (view.task, view.sample_id, view.input, view.target) == ("sums", "s0", "What is 1+1?", "2")
    assert [(t.sequence, t.start, t.end, t.prompt_tokens, t.sampled_tokens) for t in view.turns] == [
        (0, 2, 4, 2, 2),
        (0, 5, 7, 1, 2),
        (1, 6, 7, 2, 1),
    ]
    first, second, third = view.turns
    assert first.messages == [{"role": "user", "content": "Q1"}]
    assert (first.reply["content"], first.tools, first.parent_id) == ("A1", [{"name": "calc"}], None)
    assert (second.parent_id, second.policy_version_end, second.temperature) == (first.call_id, 2, 0.5)
    assert (third.parent_id, third.fork_reason, third.stop_reason) == (
        first.call_id,
        "a message was edited",
        "length",
    )
    assert second.mean_logprob == pytest.approx(-0.15)
    assert [(s.name, s.value, s.answer, s.explanation) for s in view.scores] == [
        ("exact", 1, "2", "equal"),
        ("style", "good", None, None),
    ]
    (attempt,) = view.attempts
    assert (attempt.attempt, attempt.client, attempt.kind, attempt.message) == (
        1,
        "w0",
        "timeout",
        "too slow",
    )
    assert [(turn.reply["content"], turn.sequence) for turn in attempt.turns] == [("half", None)]
    main, other = view.sequences
    assert (main.tokens, main.sampled, main.trained, main.parent, main.reason) == (7, 4, 3, None, None)
    assert (other.tokens, other.parent, other.fork, other.trained, other.reason) == (
        7,
        0,
        4,
        0,
        "prompt_empty",
    )
    assert other.fork_reason == "a message was edited"
    assert [(use.step, use.outcome, use.advantage) for use in view.uses] == [
        (1, "trained", 0.5),
        (3, "trained", 0.25),
    ]
    assert uuids(view.siblings) == ["a", "b"]
    assert (view.previous, view.next) == ("a", "c")
    assert view.line.advantage == 0.5
    assert view.metrics == {"turns": 3.0}
    assert view.queued_s == 1.5
    assert episode_view("run", Record(tmp_path), "c").queued_s is None, "no queue, or an older record"


def test_an_episode_is_found_by_the_beginning_of_its_uuid(writer: RecordWriter, tmp_path: Path) -> None:
    for uuid in ("abc1", "abc2", "abc22", "b%"):
        writer.episode(episode(uuid))
    record = flushed(writer, tmp_path)
    assert find_episode(record, "abc1") == "abc1"
    assert find_episode(record, "abc2") == "abc2"
    assert find_episode(record, "b") == "b%"
    with pytest.raises(NotRecordedError, match="several episodes begin with 'abc': abc1, abc2, abc22"):
        find_episode(record, "abc")
    with pytest.raises(NotRecordedError, match="no episode that ended begins with '%'"):
        find_episode(record, "%")


# Tokens


@pytest.fixture
def model(byte_model: Path) -> str:
    return str(byte_model)


def ids_of(text: str, folder: Path) -> list[int]:
    """One token a byte."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    characters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [tokenizer.token_to_id(character) for character in characters]


def test_no_tokenizer_is_fetched_from_a_url_that_a_run_names() -> None:
    for url in ("https://elsewhere.example/model", "s3://bucket/model", "file:///etc"):
        with pytest.raises(NotRecordedError, match="fetches no tokenizer"):
            pieces(url, [1], 0, 1)


def test_a_character_of_several_tokens_is_the_text_of_its_last(byte_model: Path, model: str) -> None:
    ids = ids_of("aé€😀b", byte_model)
    assert len(ids) == 1 + 2 + 3 + 4 + 1
    whole = ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert pieces(model, ids, 0, len(ids)) == whole
    for start in range(len(ids)):
        for end in range(start + 1, len(ids) + 1):
            found = pieces(model, ids, start, end)
            assert len(found) == end - start
            assert found == whole[start:end] or end < len(ids), (start, end)
            assert "".join(found).replace("\ufffd", "") == "".join(whole[start:end])


def write_tokens(
    writer: RecordWriter, model: str, prompt: list[int], sampled: list[int], **more: Any
) -> None:
    writer.status(model=model)
    one = said(None, prompt, sampled, "q", "a", policy_version=3)
    two = said(one, [9], [10, 11], "q", "a", policy_version=4)
    writer.episode(episode("a", detail={"calls": [one, two]}))
    sequence = trained_sequence(0, len(sampled) + 2, **more)
    writer.trained(1, [TrainedEpisode(uuid="a", outcome="trained", sequences=[sequence])])


def test_each_token_has_what_sampler_and_trainer_gave_it(
    writer: RecordWriter, tmp_path: Path, model: str
) -> None:
    used = bytes([TokenUse.TRAINED, TokenUse.CONSTRAINED, TokenUse.CORRECTED, TokenUse.TRAINED])
    write_tokens(writer, model, [1, 2, 3], [4, 5], uses=used)
    record = flushed(writer, tmp_path)
    view = token_view(record, "a", 0)
    assert view.ids == [1, 2, 3, 4, 5, 9, 10, 11]
    assert view.sampled == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert view.calls == [None, None, None, 0, 0, None, 1, 1]
    assert view.versions == [None, None, None, 3, 3, None, 4, 4]
    assert view.uses == [None, None, None, "trained", "constrained", None, "corrected", "trained"]
    assert view.logprobs == [None, None, None, -0.1, -0.2, None, -0.1, -0.2]
    assert view.trainer_logprobs == [None, None, None, 0.0, -1.0, None, -2.0, -3.0]
    assert view.entropies == [None, None, None, 0.0, 0.25, None, 0.5, 0.75]
    assert view.advantages == [None, None, None, 0.5, 0.5, None, 0.5, 0.5]
    assert (view.length, view.start, view.end, view.step, view.reason) == (8, 0, 8, 1, None)
    part = token_view(record, "a", 0, start=3, end=7)
    for name in ("ids", "texts", "sampled", "uses", "versions", "calls", "logprobs", "trainer_logprobs"):
        assert getattr(part, name) == getattr(view, name)[3:7], name
    assert (part.start, part.end, part.length) == (3, 7, 8)
    assert token_view(record, "a", 0, start=99).ids == []
    assert token_view(record, "a", 0, start=2, end=1).ids == []


# The search


def test_the_search_finds_words_ids_and_conditions(writer: RecordWriter, tmp_path: Path) -> None:
    def one(uuid: str, answer: str, reward: float, **more: Any) -> None:
        detail: dict[str, Any] = {"calls": [said(None, [1], [2], "Question?", answer)]}
        detail["metadata"] = {"scores": {"exact": reward >= 1}}
        detail["log_metrics"] = more.pop("log_metrics", {})
        writer.episode(episode(uuid, reward=reward, detail=detail, **more))

    one("7f3a-1", "I am sorry, I cannot.", 0.0, client_uuid="worker-3")
    one("7f3b-2", "The answer is: four", 1.0, step=12, queued_s=90.0)
    one("88", "is the answer four?", 0.5, log_metrics={"turns": 4.0})
    writer.episode(episode("99", status="failed", reward=None, detail={"calls": []}))
    writer.trained(1, [TrainedEpisode(uuid="88", outcome="trained", advantage=-0.25)])
    record = flushed(writer, tmp_path)

    def found(text: str) -> list[str]:
        return uuids(search(record, text).episodes)

    assert found("sorry cannot") == ["7f3a-1"]
    assert found("sorry four") == []
    assert found("SORR") == ["7f3a-1"], "a word by its beginning"
    assert found("answer four") == ["88", "7f3b-2"]
    assert found('"the answer is"') == ["7f3b-2"]
    assert found("7f3") == ["7f3b-2", "7f3a-1"]
    assert found("7f3a-1") == ["7f3a-1"]
    assert found("worker-3") == ["7f3a-1"]
    assert found("client:worker-3") == ["7f3a-1"]
    assert found("client!=worker-3") == ["99", "88", "7f3b-2"]
    assert found("reward>0") == ["88", "7f3b-2"]
    assert found("reward!=0.5") == ["7f3b-2", "7f3a-1"]
    assert found("step=12") == ["7f3b-2"]
    assert found("score/exact=0") == ["88", "7f3a-1"]
    assert found("score/exact>=1 four") == ["7f3b-2"]
    assert found("turns=4") == ["88"]
    assert found("queued_s>60") == ["7f3b-2"]
    assert found("advantage<0") == ["88"]
    assert found("outcome:trained") == ["88"]
    assert found("status=failed") == ["99"]
    assert found("") == ["99", "88", "7f3b-2", "7f3a-1"]
    assert found('sorry" OR "four') == []
    for strange in ("*", '"', "a AND", "NEAR(", "body:sorry", "-", "é😀"):
        assert found(strange) == [], strange
    with pytest.raises(NotRecordedError, match="cannot be read"):
        found("\x00")


# Alignment


def test_findings_are_counted_over_the_run_and_lead_to_episodes(writer: RecordWriter, tmp_path: Path) -> None:
    writer.episode(episode("a"))
    for step, kind, name, uuid, count in (
        (1, "error", "prompt_empty", "a", 2),
        (3, "error", "prompt_empty", "gone", 1),
        (3, "error", "id_out_of_range", "a", 9),
        (2, "finding", "logprob_gap", "", 1),
        (2, "warning", "unheard_of", "a", 4),
    ):
        writer.finding(step=step, kind=kind, name=name, detail=f"d{step}", episode=uuid, count=count)
    writer.metrics(1, {"alignment/k1": 0.5})
    record = flushed(writer, tmp_path)
    view = alignment_view(record)
    assert view.curves.keys() == {"alignment/k1"}
    assert [(k.kind, k.name, k.count, k.steps, k.first_step, k.last_step) for k in view.kinds] == [
        ("error", "id_out_of_range", 9, 1, 3, 3),
        ("error", "prompt_empty", 3, 2, 1, 3),
        ("finding", "logprob_gap", 1, 1, 2, 2),
        ("warning", "unheard_of", 4, 1, 2, 2),
    ]
    assert view.kinds[1].meaning == "no token comes before the first sampled one"
    assert view.kinds[3].meaning == ""
    page = found_in(record, "error", "prompt_empty")
    assert [(f.step, f.detail, f.count, f.episode and f.episode.uuid) for f in page.found] == [
        (3, "d3", 1, None),
        (1, "d1", 2, "a"),
    ]
    with pytest.raises(NotRecordedError, match="no error 'logprob_gap'"):
        found_in(record, "error", "logprob_gap")


# Runs


def test_a_run_of_another_version_hides_no_other(tmp_path: Path) -> None:
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
        with RecordWriter(tmp_path / name / RECORD_FILE) as writer:
            writer.episode(episode(f"of {name}"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RECORD_FILE).write_bytes(b"no database" * 100)
    runs = Runs(tmp_path)
    assert runs.folders().keys() == {"bad", "good", "odd"}
    assert runs.readable().keys() == {"good", "odd"}
    assert runs.record("good") is runs.record("good")
    name, record = runs.record_of("of odd")
    assert (name, record.folder) == ("odd", tmp_path / "odd")
    with pytest.raises(NotRecordedError, match="no run here has an episode 'of bad'"):
        runs.record_of("of bad")
    with pytest.raises(NotRecordedError, match="no run 'nope' here; there are bad, good, odd"):
        runs.record("nope")
    with pytest.raises(ConfigError, match="cannot be read"):
        runs.record("bad")
