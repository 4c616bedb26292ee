"""What the page shows of a run: each view over a small ledger."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE
from tinkerscript.ledger.health import Gain, health_rows
from tinkerscript.ledger.reader import STORE_VARIABLE, LedgerReader
from tinkerscript.ledger.rows import LEDGER_VERSION, NoteRow
from tinkerscript.ledger.step_times import step_times
from tinkerscript.ledger.tokens import TokenUse
from tinkerscript.lifecycle import ProcessId
from tinkerscript.page import lines as lines_module
from tinkerscript.page.curves import alignment_view, found_in
from tinkerscript.page.episode_view import (
    _message,  # pyright: ignore[reportPrivateUsage]
    episode_view,
    find_episode,
)
from tinkerscript.page.held_out import ComparisonQuery, compare, sample_view
from tinkerscript.page.lines import EpisodeLine, newest, search
from tinkerscript.page.overview import overview, run_line, state
from tinkerscript.page.runs import Runs
from tinkerscript.page.steps import step_page, step_view
from tinkerscript.page.token_view import pieces, token_view
from tinkerscript.protocol import Failure
from written_run import WrittenRun, said, sample_row, trained_sequence


def uuids(episodes: list[EpisodeLine]) -> list[str]:
    return [each.uuid for each in episodes]


SAMPLES = [{"id": f"s{i}", "input": f"What is {i}+1?", "target": str(i + 1)} for i in range(4)]


def write_evaluation(run: WrittenRun, label: str, step: int, rewards: dict[int, list[float]]) -> None:
    """`rewards`: sample -> those of its episodes."""
    for sample, each in rewards.items():
        for number, reward in enumerate(each):
            run.episode(
                f"{label}-{sample}-{number}",
                [said(None, [1], [2], "q", "a", policy_version=step)],
                step=step,
                label=label,
                group_id=f"eval-{label}/sample-{sample}",
                sample=SAMPLES[sample],
                reward=reward,
            )
    run.evaluation(label, step)


def write_group(run: WrittenRun, step: int, number: int, rewards: list[float | None]) -> None:
    """Episodes `step.number.i`; None: one that failed."""
    for i, reward in enumerate(rewards):
        group, sample = f"step-{step}/sample-{number}", SAMPLES[number % len(SAMPLES)]
        run.episode(f"{step}.{number}.{i}", step=step, group_id=group, sample=sample, reward=reward)


def test_what_a_resumed_run_took_back_is_in_no_group_and_no_score(run: WrittenRun) -> None:
    of_step: dict[str, Any] = {"step": 2, "group_id": "step-2/sample-0"}
    for uuid in ("old1", "old2"):
        run.episode(uuid, reward=0.0, undone=1, **of_step)
        run.trained(2, uuid, undone=1)
    run.step(2, {"reward/mean": 0.0}, undone=1)
    write_evaluation(run, "before", 0, {0: [1.0]})
    run.episode("cut", label="after", sample=SAMPLES[0], reward=0.0, undone=1)
    run.evaluation("after", 1, undone=1)
    write_evaluation(run, "after", 1, {0: [1.0]})
    for uuid in ("new1", "new2"):
        run.episode(uuid, **of_step)
    run.step(2)
    ledger = run.reader
    step = step_view(ledger, 2)
    assert [uuids(group.episodes) for group in step.groups] == [["new1", "new2"]]
    assert (step.undone, step.groups[0].mean_reward) == (2, 1.0)
    assert len(step_page(ledger).steps) == 1
    assert uuids(episode_view("r", ledger, "new1").siblings) == ["new1", "new2"]
    old = episode_view("r", ledger, "old1")
    assert uuids(old.siblings) == ["old1", "old2"]
    assert (old.line.undone, old.line.outcome, old.uses) == (1, None, [])
    assert uuids(search(ledger, "undone>0").episodes) == ["cut", "old2", "old1"]
    assert [change.after for change in compare(ledger, ComparisonQuery()).samples] == [1.0]


# The first screen


def test_the_first_screen_of_a_run_that_goes_on(tmp_path: Path) -> None:
    with WrittenRun(tmp_path / "run", task={"name": "sums"}) as run:
        run.status(
            state="running",
            process=ProcessId.own(),
            step=2,
            steps=10,
            began=100.0,
            waiting_for="step 3",
            waiting_since=150.0,
            phase={"label": "step 3", "done": 5, "total": 16, "time": 1.0},
            pending=[{"label": "step-1", "step": 1, "done": 3, "total": 8}],
        )
        write_evaluation(run, "before", 0, {0: [0.0], 1: [1.0]})
        write_group(run, 1, 0, [1.0, 0.0, None])
        episodes = {"accepted": 4.0, "failed": 1.0, "retried": 2.0, "stale": 1.0}
        groups = {"trained": 3.0, "same_reward": 2.0, "dropped": 1.0}
        for step in (1, 2):
            metrics = {"reward/mean": step / 4, "alignment/max_abs_dlogp": 0.01 * step}
            metrics |= {"alignment/calls": 10.0, "response_tokens/cut_off": 0.2, "failure/timeout": 1.0}
            metrics |= {f"episodes/{name}": number for name, number in episodes.items()}
            metrics |= {f"groups/{name}": number for name, number in groups.items()}
            run.step(step, metrics)
        write_evaluation(run, "step-2", 2, {0: [1.0], 1: [1.0]})
        run.finding(2, "finding", "logprob_gap")
        run.finding(2, "error", "prompt_empty", "1.0.0", 3)
        run.finding(2, "warning", "constrained", "1.0.0", 9)
        run.put(NoteRow(time=1.0, text="first"), NoteRow(time=2.0, text="second"))
        ledger = run.reader
    view = overview("run", ledger)
    shown = view.model_dump()
    facts = {"name": "run", "state": "running", "method": "grpo", "model": "tiny", "tasks": ["sums"]}
    numbers = {"step": 2, "steps": 10, "policy_version": 2, "episodes": 7}
    scores = {"score_before": 0.5, "score": 1.0, "reward": 0.5}
    assert shown.items() >= (facts | numbers | scores).items()
    assert shown["waiting"].items() >= {"what": "step 3", "since": 150.0}.items()
    assert shown["phase"].items() >= {"label": "step 3", "done": 5, "total": 16}.items()
    assert [each.label for each in view.evaluations] == ["before", "step-2"]
    assert [(each.label, each.done, each.total) for each in view.pending] == [("step-1", 3, 8)]
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
    assert run_line("run", ledger).model_dump().items() <= shown.items()


@pytest.mark.parametrize(
    ("seconds", "lag", "shares", "words"),
    [
        # rollout, train, publish, sample, wait_stale; train, publish, sample, programs, old groups
        ((7, 3, 0, 7, 0), 0, (0.3, 0, 0.7, 0, 0), "Rollouts (70%) and training (30%) take turns: "),
        ((7, 3, 0, 5, 0), 1, (0.3, 0, 0.5, 0.2, 0), "Model calls are the bottleneck: "),
        ((9, 1, 0, 5, 0), 0, (0.1, 0, 0.5, 0.4, 0), "Model calls are the bottleneck: "),
        ((9, 1, 0, 2, 0), 0, (0.1, 0, 0.2, 0.7, 0), "The episodes' own programs are the bottleneck: "),
        ((1, 9, 2, 1, 0), 4, (0.7, 0.2, 0.1, 0, 0), "Training is the bottleneck: "),
        ((1, 9, 6, 1, 0), 4, (0.3, 0.6, 0.1, 0, 0), "Publishing the weights is the bottleneck: "),
        ((8, 2, 0, 7, 5), 4, (0.2, 0, 0.3, 0, 0.5), "Steps wait 50% of the time for groups "),
    ],
)
def test_the_time_of_steps_is_divided_and_names_the_key_to_turn(
    tmp_path: Path, seconds: tuple[float, ...], lag: int, shares: tuple[float, ...], words: str
) -> None:
    with WrittenRun(tmp_path / "run", training={"max_policy_lag": lag}) as run:
        names = ("rollout", "train", "publish", "sample", "wait_stale")
        for step in (1, 2):
            given = {f"time/{name}_s": each / 2 for name, each in zip(names, seconds, strict=True)}
            run.step(step, given if seconds[-1] else {k: v for k, v in given.items() if "stale" not in k})
        times = step_times(run.reader)
    assert times is not None
    found = (times.train, times.publish, times.sample, times.programs, times.old_groups)
    assert found == pytest.approx(shares)
    assert times.words.startswith(words)


def test_without_what_model_calls_take_the_time_is_not_divided(run: WrittenRun) -> None:
    assert step_times(run.reader) is None
    run.step(1, {"time/rollout_s": 1.0, "time/train_s": 1.0, "time/publish_s": 0.1})
    assert step_times(run.reader) is None


def test_before_there_is_a_ledger_a_run_is_shown_as_one_that_began(tmp_path: Path) -> None:
    with WrittenRun(tmp_path, engine={"model": "tiny"}):
        pass
    (tmp_path / LEDGER_FILE).unlink()
    ledger = LedgerReader(tmp_path)
    view = overview("run", ledger)
    assert (view.model, view.step, view.episodes, view.newest) == ("tiny", 0, 0, [])
    assert search(ledger, "word").episodes == []


def test_the_time_left_is_that_of_steps_of_a_usual_length(run: WrittenRun) -> None:
    """8 of 50 s; the last one ended 30 s ago."""
    run.status(state="running", process=ProcessId.own(), step=2, steps=10, began=100.0)
    for step, ago in enumerate((80.0, 30.0), 1):
        run.step(step, time=time.time() - ago)
    assert overview("run", run.reader).time_left_s == pytest.approx(370, abs=20)


@pytest.mark.parametrize(
    ("sampling", "longest", "advice"),
    [
        ({"max_tokens": 16}, 16.0, "raise sampling.max_tokens (16), or"),
        ({"max_tokens": 16}, 8.0, "at 8 tokens, not by sampling.max_tokens (16): raise the task's"),
        ({}, 8.0, "raise sampling.max_tokens, or the task's own max_tokens, or"),
    ],
)
def test_what_cuts_replies_off_is_named(
    tmp_path: Path, sampling: dict[str, Any], longest: float, advice: str
) -> None:
    with WrittenRun(tmp_path) as run:
        (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump({"sampling": sampling}))
        cut = {"alignment/calls": 10.0, "response_tokens/cut_off": 0.6, "response_tokens/max": longest}
        run.step(1, cut)
        (row,) = (row for row in health_rows(run.reader) if row.name == "cut_off")
    assert row.words.startswith(advice)


@pytest.mark.parametrize(
    ("nats", "clipped", "kind"),
    [(0.2, 0.0, "warn"), (0.02, 0.75, "warn"), (0.02, 0.3, "good"), (0.003, 0.75, "good")],
)
def test_a_narrow_clip_is_no_reason_to_worry(run: WrittenRun, nats: float, clipped: float, kind: str) -> None:
    run.step(1, {"train/kl_step": nats, "train/clip_fraction": clipped})
    assert [row.kind for row in health_rows(run.reader) if row.name == "rate"] == [kind]


def test_a_trainer_that_is_gone_without_a_word_was_stopped() -> None:
    host, pid, started = ProcessId.own()
    for word, process, expected in (
        ("running", [host, pid, started], "running"),
        ("running", [host, pid, started - 1], "stopped"),
        ("running", [f"{host}-other", pid, started - 1], "running"),
        ("finished", [host, pid, started - 1], "finished"),
    ):
        assert state({"state": word, "process": process}) == expected


# Steps


def test_a_step_has_its_groups_in_order_and_its_neighbors(run: WrittenRun) -> None:
    for step in (1, 2, 4):
        run.step(step, {"reward/mean": 0.75, "eval/score": 1.0} if step == 2 else {})
    write_group(run, 2, 10, [1.0, 0.0])
    write_group(run, 2, 9, [1.0, 1.0])
    write_group(run, 1, 8, [0.0])
    write_evaluation(run, "step-2", 2, {0: [1.0]})
    run.trained(2, "2.10.0", advantage=0.5)
    run.trained(2, "2.10.1", advantage=-0.5)
    run.trained(2, "2.9.0", outcome="same_reward", advantage=0.0)
    view = step_view(run.reader, 2)
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


def test_a_step_that_was_stopped_says_why(run: WrittenRun) -> None:
    run.step(1)
    write_group(run, 2, 0, [1.0, 0.0])
    sequence = trained_sequence(0, 3, reason="the step was stopped: logprob_gap")
    run.trained(2, "2.0.0", [sequence], outcome="set_aside")
    run.step(2, stopped="logprob_gap", policy_version=1)
    ledger = run.reader
    assert [(line.step, line.stopped) for line in step_page(ledger).steps] == [(2, "logprob_gap"), (1, "")]
    view = step_view(ledger, 2)
    assert (view.line.stopped, view.groups[0].episodes[0].outcome) == ("logprob_gap", "set_aside")
    episode = episode_view("run", ledger, "2.0.0")
    assert episode.sequences[0].reason == "the step was stopped: logprob_gap"


# Lists of episodes


def test_lists_of_episodes_are_filtered_and_paged(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "FIRST_ROWS", 2)
    monkeypatch.setattr(lines_module, "SCAN_ROWS", 3)
    for number in range(20):
        cut = said(None, [1], [2], "q", "a", stop_reason="length" if number % 4 == 0 else "stop")
        run.episode(f"e{number}", [cut], reward=1.0 if number % 5 else None)
    run.trained(1, "e1")
    run.trained(1, "e2", outcome="stale")
    ledger = run.reader

    def pages(show: str, limit: int) -> list[list[str]]:
        found, before = [], None
        while True:
            page = newest(ledger, show=show, before=before, limit=limit)
            found.append([uuid[1:] for uuid in uuids(page.episodes)])
            if page.next is None:
                return found
            before = page.next

    assert pages("failed", 3) == [["15", "10", "5"], ["0"]]
    assert pages("truncated", 4) == [["16", "12", "8", "4"], []]
    assert pages("trained", 5) == [["1"]]
    assert pages("untrained", 5) == [["2"]]
    everything = pages("all", 7)
    assert [*chain.from_iterable(everything)] == [str(number) for number in range(19, -1, -1)]
    assert len([*chain.from_iterable(pages("accepted", 50))]) == 16


# Held-out samples


def test_two_evaluations_are_compared_sample_by_sample(run: WrittenRun) -> None:
    write_evaluation(run, "before", 0, {0: [0.0, 0.0], 1: [1.0], 2: [0.5], 3: [1.0]})
    write_evaluation(run, "step-5", 5, {0: [1.0, 0.0], 1: [0.25], 2: [0.5]})
    write_evaluation(run, "after", 9, {0: [0.0], 1: [1.0], 2: [1.0]})
    ledger = run.reader
    whole = compare(ledger, ComparisonQuery())
    assert (whole.before.label, whole.after.label) == ("before", "after")
    assert (whole.better, whole.worse, whole.same) == (1, 0, 3)
    found = compare(ledger, ComparisonQuery(before="before", after="step-5"))
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
    assert compare(ledger, ComparisonQuery(after="before")).gain == Gain(mean=0, margin=0, samples=4)
    assert overview("run", ledger).gain == whole.gain
    assert [c.id for c in compare(ledger, ComparisonQuery(after="step-5", show="better")).samples] == ["s0"]
    with pytest.raises(NotRecordedError, match="no evaluation 'nope'; it has before, step-5, after"):
        compare(ledger, ComparisonQuery(before="nope"))


def test_a_sample_is_named_by_the_digest_of_what_a_client_got(run: WrittenRun) -> None:
    write_evaluation(run, "before", 0, {0: [0.0, 1.0], 1: [1.0]})
    write_evaluation(run, "after", 3, {0: [1.0]})
    run.episode("untouched", sample={})
    ledger = run.reader
    digest = sample_row(SAMPLES[0]).digest.hex()
    assert episode_view("run", ledger, "after-0-0").line.sample == digest
    view = sample_view(ledger, digest)
    assert (view.id, view.task, view.sample) == ("s0", "sums", SAMPLES[0])
    assert uuids(view.episodes) == ["after-0-0", "before-0-1", "before-0-0"]
    assert [(each.policy_version, each.episodes, each.mean_reward) for each in view.versions] == [
        (0, 3, 2 / 3)
    ]
    page = sample_view(ledger, digest, limit=2)
    assert uuids(sample_view(ledger, digest, before=page.next).episodes) == ["before-0-0"]
    assert uuids(search(ledger, f"sample:{digest[:12]}").episodes) == uuids(view.episodes)
    for unknown, reason in (("ab" * 32, "the run has no sample"), ("3", "is not the digest of a sample")):
        with pytest.raises(NotRecordedError, match=reason):
            sample_view(ledger, unknown)


# An episode


def test_an_episode_has_its_turns_its_fork_and_its_failed_attempt(run: WrittenRun) -> None:
    one = said(None, [1, 2], [3, 4], "Q1", "A1", tools='[{"name": "calc"}]')
    two = said(one, [5], [6, 7], "Q2", "A2", policy_version_end=2, temperature=0.5)
    fork = said(one, [8, 9], [10], "Q3", "A3", fork_reason="a message was edited", stop_reason="length")
    failed = said(None, [1], [2, 3], "Q1", "half")
    metadata = {
        "scores": {"exact": 1, "style": "good"},
        "explanations": {"exact": {"answer": "2", "explanation": "equal"}},
        "other": [1],
    }
    run.episode("a", group_id="g")
    run.episode(
        "b",
        group_id="g",
        attempt=2,
        queued_s=1.5,
        calls={1: [failed], 2: [one, two, fork]},
        failures=[Failure(attempt=1, client_uuid="worker-1", kind="timeout", message="too slow")],
        metadata=metadata,
        log_metrics={"turns": 3.0},
    )
    run.episode("c", group_id="h")
    sequences = [
        trained_sequence(0, 4, uses=bytes([TokenUse.TRAINED, TokenUse.CONSTRAINED, 0, 0])),
        trained_sequence(1, 3, uses=bytes([TokenUse.LEFT_OUT]), reason="prompt_empty"),
    ]
    run.trained(1, "b", sequences, advantage=0.5)
    run.trained(3, "b", sequences, advantage=0.25, reason="replayed")
    ledger = run.reader
    view = episode_view("run", ledger, "b")
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
    assert (third.parent_id, third.stop_reason) == (first.call_id, "length")
    assert third.fork_reason == "a message was edited"
    assert second.mean_logprob == pytest.approx(-0.15)
    assert [(s.name, s.value, s.answer, s.explanation) for s in view.scores] == [
        ("exact", 1, "2", "equal"),
        ("style", "good", None, None),
    ]
    (attempt,) = view.attempts
    assert (attempt.attempt, attempt.client) == (1, "worker-1")
    assert (attempt.kind, attempt.message) == ("timeout", "too slow")
    assert [(turn.reply["content"], turn.sequence) for turn in attempt.turns] == [("half", None)]
    main, other = view.sequences
    assert (main.tokens, main.sampled, main.trained, main.parent, main.reason) == (7, 4, 3, None, None)
    assert (other.tokens, other.parent, other.fork, other.trained) == (7, 0, 4, 0)
    assert (other.reason, other.fork_reason) == ("prompt_empty", "a message was edited")
    assert [(use.step, use.outcome, use.advantage, use.reason) for use in view.uses] == [
        (1, "trained", 0.5, ""),
        (3, "trained", 0.25, "replayed"),
    ]
    assert uuids(view.siblings) == ["a", "b"]
    assert (view.previous, view.next) == ("a", "c")
    assert view.line.advantage == 0.5
    assert view.metrics == {"turns": 3.0}
    assert view.queued_s == 1.5
    assert episode_view("run", ledger, "c").queued_s is None, "unknown"


def test_an_episode_that_lost_its_calls_keeps_their_sums(run: WrittenRun) -> None:
    run.episode("e", emptied=True)
    run.trained(1, "e", advantage=0.5)
    ledger = run.reader
    view = episode_view("run", ledger, "e")
    assert (view.recorded, view.turns, view.sequences) == (False, [], [])
    assert (view.line.calls, view.line.sampled_tokens, view.line.outcome) == (1, 3, "trained")
    with pytest.raises(NotRecordedError, match="the tokens of episode 'e' are not recorded"):
        token_view(ledger, "e", 0)


def test_what_would_unpack_to_gigabytes_is_not_unpacked(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger may be from elsewhere."""
    monkeypatch.setattr("tinkerscript.ledger.compression.MAX_CALL_BYTES", 10**6)
    run.episode("e")
    run.trained(1, "e", [trained_sequence(0, 3)])
    bomb = zstandard.ZstdCompressor().compress(b"\x00" * 10**7)
    assert len(bomb) < 1000
    for table, column in (("calls", "call"), ("tokens", "sequences")):
        ((kept,),) = run.execute(f"SELECT {column} FROM {table}").fetchall()
        run.execute(f"UPDATE {table} SET {column} = ?", bomb)
        refused = f"something else than {table}: 10000000 bytes are packed"
        with pytest.raises(NotRecordedError, match=refused):
            episode_view("run", run.reader, "e")
        with pytest.raises(NotRecordedError, match=refused):
            token_view(run.reader, "e", 0)
        run.execute(f"UPDATE {table} SET {column} = ?", kept)
    assert token_view(run.reader, "e", 0).ids == [1, 2, 3, 4, 5]


def test_an_episode_is_found_by_the_beginning_of_its_uuid(run: WrittenRun) -> None:
    for uuid in ("abc1", "abc2", "abc22", "b%"):
        run.episode(uuid)
    ledger = run.reader
    assert find_episode(ledger, "abc1") == "abc1"
    assert find_episode(ledger, "abc2") == "abc2"
    assert find_episode(ledger, "b") == "b%"
    with pytest.raises(NotRecordedError, match="several episodes begin with 'abc': abc1, abc2, abc22"):
        find_episode(ledger, "abc")
    with pytest.raises(NotRecordedError, match="no episode that ended begins with '%'"):
        find_episode(ledger, "%")


# Tokens


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


def test_a_character_of_several_tokens_is_the_text_of_its_last(byte_model: Path) -> None:
    model, ids = str(byte_model), ids_of("aé€😀b", byte_model)
    assert len(ids) == 1 + 2 + 3 + 4 + 1
    whole = ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert pieces(model, ids, 0, len(ids)) == whole
    for start in range(len(ids)):
        for end in range(start + 1, len(ids) + 1):
            found = pieces(model, ids, start, end)
            assert len(found) == end - start
            assert found == whole[start:end] or end < len(ids), (start, end)
            assert "".join(found).replace("\ufffd", "") == "".join(whole[start:end])


def test_each_token_has_what_sampler_and_trainer_gave_it(tmp_path: Path, byte_model: Path) -> None:
    one = said(None, [1, 2, 3], [4, 5], "q", "a", policy_version=3)
    two = said(one, [9], [10, 11], "q", "a", policy_version=4)
    used = bytes([TokenUse.TRAINED, TokenUse.CONSTRAINED, TokenUse.CORRECTED, TokenUse.TRAINED])
    with WrittenRun(tmp_path, engine={"model": str(byte_model)}) as run:
        run.episode("a", [one, two])
        run.trained(1, "a", [trained_sequence(0, 4, uses=used)])
        ledger = run.reader
    view = token_view(ledger, "a", 0)
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
    part = token_view(ledger, "a", 0, start=3, end=7)
    for name in ("ids", "texts", "sampled", "uses", "versions", "calls", "logprobs", "trainer_logprobs"):
        assert getattr(part, name) == getattr(view, name)[3:7], name
    assert (part.start, part.end, part.length) == (3, 7, 8)
    assert token_view(ledger, "a", 0, start=99).ids == []
    assert token_view(ledger, "a", 0, start=2, end=1).ids == []


# Alignment


def test_findings_are_counted_over_the_run_and_lead_to_episodes(run: WrittenRun) -> None:
    run.episode("a")
    run.finding(1, "error", "prompt_empty", "a", 2)
    run.finding(3, "error", "prompt_empty", "gone", 1)
    run.finding(3, "error", "id_out_of_range", "a", 9)
    run.finding(2, "finding", "logprob_gap")
    run.finding(2, "warning", "unheard_of", "a", 4)
    run.step(1, {"alignment/k1": 0.5})
    ledger = run.reader
    view = alignment_view(ledger)
    assert view.curves.keys() == {"alignment/k1"}
    assert [(k.kind, k.name, k.count, k.steps, k.first_step, k.last_step) for k in view.kinds] == [
        ("error", "id_out_of_range", 9, 1, 3, 3),
        ("error", "prompt_empty", 3, 2, 1, 3),
        ("finding", "logprob_gap", 1, 1, 2, 2),
        ("warning", "unheard_of", 4, 1, 2, 2),
    ]
    assert view.kinds[1].meaning == "no token comes before the first sampled one"
    assert view.kinds[3].meaning == ""
    page = found_in(ledger, "error", "prompt_empty")
    assert [(f.step, f.detail, f.count, f.episode and f.episode.uuid) for f in page.found] == [
        (3, "d3", 1, None),
        (1, "d1", 2, "a"),
    ]
    with pytest.raises(NotRecordedError, match="no error 'logprob_gap'"):
        found_in(ledger, "error", "logprob_gap")


# Runs


def test_a_run_of_another_version_hides_no_other(tmp_path: Path) -> None:
    for name in ("bad", "good", "odd", "old"):
        with WrittenRun(tmp_path / name) as run:
            run.episode(f"of {name}")
            if name == "old":
                run.execute("PRAGMA user_version = 1")
    (tmp_path / "bad" / LEDGER_FILE).write_bytes(b"no database" * 100)
    (tmp_path / "no run").mkdir()
    runs = Runs(tmp_path)
    assert runs.folders().keys() == {"bad", "good", "odd", "old"}
    assert runs.readable().keys() == {"good", "odd"}
    assert runs.ledger("good") is runs.ledger("good")
    name, ledger = runs.ledger_of("of odd")
    assert (name, ledger.folder) == ("odd", tmp_path / "odd")
    with pytest.raises(NotRecordedError, match="no run here has an episode 'of bad'"):
        runs.ledger_of("of bad")
    with pytest.raises(NotRecordedError, match="no run 'nope' here; the runs here are bad, good, odd, old"):
        runs.ledger("nope")
    with pytest.raises(ConfigError, match="file is not a database"):
        runs.ledger("bad")
    with pytest.raises(ConfigError, match=f"has version 1, and this tinkerscript reads {LEDGER_VERSION}"):
        runs.ledger("old")


def test_a_store_elsewhere_is_opened_only_if_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from elsewhere could name any file or database."""
    with WrittenRun(tmp_path / "mine") as mine:
        mine.episode("e")
    store = f"sqlite://{tmp_path / 'mine' / LEDGER_FILE}"
    named = tmp_path / "named"
    with WrittenRun(named, interchange_server={"store": store}):
        (named / LEDGER_FILE).unlink()
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"names the ledger .*: if it is yours, set {STORE_VARIABLE}"):
        Runs(tmp_path).ledger("named")
    assert Runs(tmp_path).readable().keys() == {"mine"}
    monkeypatch.setenv(STORE_VARIABLE, store)
    assert uuids(overview("named", Runs(tmp_path).ledger("named")).newest) == ["e"]


def test_a_conversation_shows_where_its_images_were() -> None:
    image = {"at": 5, "sha256": "0" * 64, "width": 40, "height": 30}
    said = {"role": "user", "content": "Look: what is it?", "images": [image, {**image, "at": 17}]}
    assert _message(said)["content"] == [
        {"text": "Look:"},
        {"text": "[image of 40 x 30 pixels]"},
        {"text": " what is it?"},
        {"text": "[image of 40 x 30 pixels]"},
    ]
    for strange in ("x", [1], [{}], [{"at": "5"}], [{"at": None}], {}):
        shown = _message({**said, "images": strange})["content"]
        assert shown in ("Look: what is it?", [{"text": "Look: what is it?"}])
