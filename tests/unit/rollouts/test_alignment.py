"""The alignment report: every error and warning by name, and streams corrupted in every known way."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.alignment import ERRORS, WARNINGS, AlignmentReport, find_errors, find_warnings
from tinkerscript.rollouts.alignment.diagnosis import Contradictions, Finding, Gap, Pair, diagnose
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.rollouts.call import Call, full_prompts, pack_ids, unpack_ids, vocabulary_fingerprint
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout, Segment

ROOT = Path(__file__).parents[3]


def one(*calls: Call) -> Rollout:
    (rollout,) = merge_calls(list(calls), episode_uuid="e")
    return rollout


def plain() -> Rollout:
    return one(make_call(None, [1], [2, 3]))


def with_logprobs(*logprobs: float) -> Rollout:
    return one(make_call(None, [1], [2, 3], logprobs=list(logprobs)))


def changed(**arrays: Any) -> Rollout:
    return dataclasses.replace(plain(), **arrays)


@pytest.mark.parametrize(
    ("rollout", "error"),
    [
        (changed(logprobs=np.zeros(2, np.float32)), "lengths_differ"),
        (changed(sampled=np.zeros(3, np.bool_)), "nothing_sampled"),
        (changed(tokens=unpack_ids(pack_ids([1, 2, 4]))), "tokens_differ_from_call"),
        (changed(logprobs=np.array([0, -0.1, -0.3], np.float32)), "logprobs_differ_from_call"),
        (changed(tokens=unpack_ids(pack_ids([9, 2, 3]))), "prefix_differs_from_prompt"),
        (changed(sampled=np.array([True, True, True])), "mask_differs_from_calls"),
        (changed(rewards=np.ones(3, np.float32)), "reward_on_unsampled_token"),
        (changed(loss_mask=np.ones(3, np.bool_)), "loss_on_unsampled_token"),
        (changed(loss_mask=np.ones(2, np.bool_)), "lengths_differ"),
        (one(make_call(None, [], [2, 3])), "prompt_empty"),
        (one(make_call(None, [1], [2, 3], temperature=0.0, logprob_kind="raw")), "greedy"),
        (
            one(make_call(None, [1], [2, 3], temperature=0.7, logprob_kind="raw")),
            "raw_logprobs_at_temperature",
        ),
        (one(make_call(None, [1], [2, 3], ids_from="retokenised")), "ids_retokenised"),
        (one(make_call(None, [1], [2, 10])), "id_out_of_range"),
        (with_logprobs(float("nan"), -1.0), "logprob_not_finite"),
        (with_logprobs(0.1, -1.0), "logprob_positive"),
        (with_logprobs(0.0, 0.0), "logprobs_all_zero"),
        (with_logprobs(-9999.0, -1.0), "logprob_sentinel"),
    ],
)
def test_what_is_wrong_with_a_sequence_is_named(rollout: Rollout, error: str) -> None:
    assert find_errors(rollout, vocabulary=10) == [error]


def test_a_temperature_is_an_error_where_the_trainer_cannot_divide_by_it() -> None:
    first = make_call(None, [1], [2, 3])
    rollout = one(first, make_call(first, [4], [5], temperature=0.7))
    assert find_errors(rollout, vocabulary=10) == []
    assert find_errors(rollout, vocabulary=10, scales_logits=False) == ["temperature_not_one"]
    assert rollout.temperatures.tolist() == pytest.approx([1, 1, 1, 1, 0.7])


def test_calls_that_overlap_are_named() -> None:
    rollout = plain()
    (segment,) = rollout.segments
    twice = dataclasses.replace(rollout, segments=(segment, Segment(segment.call, 1, 3)))
    assert "calls_overlap" in find_errors(twice, vocabulary=10)


def test_the_prefix_of_a_fork_is_checked_with_its_episodes_calls() -> None:
    first = make_call(None, [1, 2], [3])
    left = make_call(first, [4], [5])
    right = make_call(first, [4], [6])
    rollouts = merge_calls([first, left, right], episode_uuid="e")
    prompts = full_prompts([first, left, right])
    assert [find_errors(r, vocabulary=10, prompts=prompts) for r in rollouts] == [[], []]
    tokens = rollouts[1].tokens.copy()
    tokens[0] = 9
    moved = dataclasses.replace(rollouts[1], tokens=tokens)
    assert find_errors(moved, vocabulary=10, prompts=prompts) == ["prefix_differs_from_prompt"]
    assert find_errors(moved, vocabulary=10) == [], "without the parent's call its prefix is not known"
    tokens[3] = 9
    assert find_errors(moved, vocabulary=10) == ["prefix_differs_from_prompt"]


def test_warnings_are_counted_by_name() -> None:
    STOP = 9
    first = make_call(None, [STOP], [2, STOP, 3, STOP])
    second = make_call(first, [1], [4, 5], prompt_from="client", top_p=0.9, top_k=4, tokenizer="theirs")
    third = make_call(second, [1], [4], stop_reason="length", temperature=0, logprob_kind="unknown")
    found = find_warnings(one(first, second, third), stop_ids={STOP}, tokenizer="ours")
    assert found == {
        "stop_token_inside": 1,
        "no_stop_token": 1,
        "prompt_rendered_by_the_client": 1,
        "top_p": 1,
        "top_k": 1,
        "logprob_kind_unknown": 1,
        "tokenizer_differs": 1,
    }
    sound = one(make_call(None, [1], [2, STOP], tokenizer="ours"))
    assert not find_warnings(sound, stop_ids={STOP}, tokenizer="ours")
    assert set(found) <= set(WARNINGS)


def test_a_fingerprint_tells_vocabularies_apart() -> None:
    ours = {"a": 0, "b": 1, "\udc80": 2}
    assert vocabulary_fingerprint(ours) == vocabulary_fingerprint(dict(reversed(ours.items())))
    others = [{"a": 1, "b": 0, "\udc80": 2}, {"a": 0, "b": 1}, {"a": 0, "c": 1, "\udc80": 2}]
    assert len({vocabulary_fingerprint(v) for v in [ours, *others]}) == 4


# Comparison with the trainer


class Model:
    """Next-token distributions that depend on the last two tokens, over 40 tokens; peaked or not."""

    def __init__(self, peak: float = 3.0) -> None:
        self.table = peak * np.random.default_rng(5).standard_normal((40, 40, 40))

    def logprobs(self, a: int, b: int) -> np.ndarray:
        logits = self.table[a, b]
        return logits - np.log(np.exp(logits).sum())

    def sample(self, random: np.random.Generator, length: int) -> list[int]:
        ids = [0, 0]
        for _ in range(length):
            p = np.exp(self.logprobs(ids[-2], ids[-1]))
            ids.append(int(random.choice(40, p=p / p.sum())))
        return ids[2:]

    def _distributions(self, ids: list[int]) -> list[np.ndarray]:
        whole = [0, 0, *ids]
        return [self.logprobs(whole[i], whole[i + 1]) for i in range(len(ids))]

    def score(self, ids: list[int]) -> np.ndarray:
        found = zip(self._distributions(ids), ids, strict=True)
        return np.array([each[token] for each, token in found], np.float32)

    def best(self, ids: list[int]) -> np.ndarray:
        return np.array([each.max() for each in self._distributions(ids)], np.float32)


def calls(model: Model, number: int = 12, length: int = 15) -> list[list[int]]:
    random = np.random.default_rng(2)
    return [model.sample(random, int(random.integers(4, length))) for _ in range(number)]


def canonical(ids: Any) -> list[int]:
    """Ids of the same text as a tokenizer would make them: some pairs of tokens are one token to it."""
    out: list[int] = []
    for token in (int(i) for i in ids):
        if out and out[-1] < 10 and out[-1] % 2 and token < 20:
            token = 20 + out.pop() * token % 20
        out.append(token)
    return out


Stream = Callable[[Model, list[int]], np.ndarray]
"""What comes instead of the log probabilities of the ids."""


def shifted(by: int) -> Stream:
    return lambda model, ids: np.roll(model.score(ids), by)


def cut_short(filler: float, cut: int) -> Stream:
    return lambda model, ids: np.append(model.score(ids)[:-cut], [filler] * cut)


RANDOM = np.random.default_rng(0)
HARDLY_PEAKED, PEAKED = 0.5, 3.0
STREAMS: list[tuple[float, Stream, str, str]] = [
    (PEAKED, shifted(1), "logprobs_shifted", "1 token too late"),
    (PEAKED, shifted(-1), "logprobs_shifted", "1 token too early"),
    (HARDLY_PEAKED, shifted(1), "logprobs_shifted", "1 token too late"),
    (HARDLY_PEAKED, shifted(2), "logprobs_shifted", "2 tokens too late"),
    (PEAKED, shifted(-2), "logprobs_shifted", "2 tokens too early"),
    (PEAKED, cut_short(0.0, 1), "logprobs_truncated", "the last 1.0 tokens of a call"),
    (PEAKED, cut_short(-1.0, 3), "logprobs_truncated", "the last 3.0 tokens of a call"),
    (PEAKED, Model.best, "logprobs_of_the_likeliest", ""),
    (HARDLY_PEAKED, Model.best, "logprobs_of_the_likeliest", ""),
    # Other gaps are not given a name that they do not have.
    (PEAKED, lambda model, ids: model.score(ids) - 0.5, "logprob_gap", ""),
    (PEAKED, lambda model, ids: model.score(ids) + RANDOM.normal(-1, 0.5, len(ids)), "logprob_gap", ""),
    (PEAKED, lambda model, ids: 0.5 * model.score(ids), "logprob_gap", ""),
    (PEAKED, lambda model, ids: RANDOM.permutation(model.score(ids)), "logprob_gap", ""),
]


@pytest.mark.parametrize(("peak", "stream", "name", "words"), STREAMS)
def test_what_is_wrong_with_a_stream_is_named(peak: float, stream: Stream, name: str, words: str) -> None:
    model = Model(peak)
    pairs = [
        Pair(np.array(ids, np.int32), stream(model, ids).astype(np.float32), model.score(ids))
        for ids in calls(model)
    ]
    finding = diagnose(pairs, threshold=0.05, retokenise=canonical)
    assert finding is not None
    assert finding.name == name
    assert words in finding.detail


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("places", ["first", "last", "both"])
def test_a_constant_stream_is_not_shifted(number: int, places: str) -> None:
    """Of a collapsed policy: what differs at an end of each call is outside of what a shift compares."""
    ours, theirs = np.full(12, -0.01, np.float32), np.full(12, -0.01, np.float32)
    if places in ("first", "both"):
        ours[:number] = -3.0
    if places == "last":
        ours[-number:] = (-3.0, -4.0)[-number:]
    if places == "both":
        theirs[-number:] = -3.0
    finding = diagnose([Pair(np.arange(12, dtype=np.int32), ours, theirs)] * 4, threshold=0.1)
    assert finding is not None
    assert finding.name == "logprob_gap"


@pytest.mark.parametrize("peak", [0.5, 3.0])
def test_ids_made_from_text_are_named(peak: float) -> None:
    model = Model(peak)
    pairs: list[Pair] = []
    for ids in calls(model, 40):
        remade = canonical(ids)
        # The trainer scores what it is given; the log probabilities came with what was sampled.
        logprobs = model.score(ids)[: len(remade)]
        pairs.append(Pair(np.array(remade, np.int32), logprobs, model.score(remade)))
    assert any(pair.gap > 0.1 for pair in pairs)
    finding = diagnose(pairs, threshold=0.1, retokenise=canonical)
    assert finding is not None
    assert finding.name == "ids_retokenised"
    unknown = diagnose(pairs, threshold=0.1)
    assert unknown is not None
    assert unknown.name != "ids_retokenised", "without a tokenizer there is no proof"


def test_what_fits_and_what_is_too_little_are_not_named() -> None:
    model, random = Model(), np.random.default_rng(0)
    pairs: list[Pair] = []
    for ids in calls(model):
        noise = random.normal(0, 0.03, len(ids)).astype(np.float32)
        pairs.append(Pair(np.array(ids, np.int32), model.score(ids) + noise, model.score(ids)))
    assert diagnose(pairs, threshold=0.1) is None
    few = model.score([1, 2, 3])
    finding = diagnose([Pair(np.array([1, 2, 3], np.int32), np.roll(few, 1), few)], threshold=0.1)
    assert finding is not None
    assert finding.name == "logprob_gap", "three tokens prove no pattern"


def contradictions(stream: Stream) -> Finding | None:
    """What siblings show that sample the same prefixes again and again."""
    model, random = Model(), np.random.default_rng(9)
    siblings: list[Rollout] = []
    for number in range(64):
        ids = model.sample(random, 12)
        logprobs = stream(model, ids).tolist()
        siblings.append(one(make_call(None, [0, 0], ids, logprobs=logprobs, policy_version=number % 2)))
    found = Contradictions()
    found.add(siblings)
    assert found.repeats + found.prefixes > 8
    return found.finding(threshold=0.1)


def test_siblings_show_without_a_trainer_that_a_stream_is_wrong() -> None:
    assert contradictions(Model.score) is None
    late = contradictions(shifted(1))
    assert late is not None
    assert (late.name, "sampled again after the same prefix" in late.detail) == ("logprobs_contradict", True)
    best = contradictions(Model.best)
    assert best is not None
    assert "sum to more than 1" in best.detail


def test_the_gaps_figures_are_those_of_their_formulas() -> None:
    sampler, trainer = np.array([-1.0, -2.0, -0.5], np.float32), np.array([-1.5, -2.0, -0.25], np.float32)
    whole = Gap()
    whole.add(Gap.between(sampler[:1], trainer[:1]))
    whole.add(Gap.between(sampler[1:], trainer[1:]))
    w = np.exp([-0.5, 0, 0.25])
    assert whole.metrics() == pytest.approx(
        {
            "mean_abs_dlogp": 0.25,
            "max_abs_dlogp": 0.5,
            "k1": 0.25 / 3,
            "k3": float(np.mean(w - 1 - np.array([-0.5, 0, 0.25]))),
            "effective_sample_size": float(w.sum() ** 2 / (3 * (w**2).sum())),
            "tokens_compared": 3,
        }
    )
    assert Gap.from_json(json.loads(json.dumps(whole.as_json()))) == whole
    assert Gap().metrics() == {}
    impossible = Gap.between(sampler[:1], np.array([-np.inf], np.float32))
    assert impossible.max_abs == 50
    with pytest.raises(AlignmentError, match="not numbers"):
        Gap.between(sampler[:1], np.array([np.nan], np.float32))


def filled() -> AlignmentReport:
    report = AlignmentReport()
    report.begin_step()
    first = make_call(None, [1, 2], [3, 4])
    calls_ = [
        first,
        make_call(first, [5], [6], stop_reason="length"),
        make_call(None, [7], [8], fork_reason="edited", ids_from="meta_info"),
    ]
    made = make_episode(calls_)
    report.add_episode(made)
    for rollout in made.rollouts:
        report.add_trained(rollout)
    report.add_gap(0, Gap.between(np.array([-1.0], np.float32), np.array([-1.25], np.float32)))
    report.add_gap(2, Gap.between(np.array([-1.0], np.float32), np.array([-3.0], np.float32)))
    return report


def test_a_report_counts_a_step_and_the_whole() -> None:
    report = filled()
    metrics = report.step.metrics()
    assert metrics["alignment/sequences_per_episode"] == 2
    assert metrics["alignment/merge_ratio"] == (4 + 6 + 2) / 8
    assert (metrics["alignment/tokens_sampled"], metrics["alignment/tokens_trained"]) == (4, 4)
    assert metrics["alignment/tokens_total"] == 8
    assert metrics["alignment/truncated"] == 1
    assert metrics["alignment/forks/edited"] == 1
    assert metrics["alignment/ids_from/meta_info"] == 0.25
    assert metrics["alignment/logprob_kinds/processed"] == 1
    assert metrics["alignment/max_abs_dlogp"] == report.max_abs_dlogp == 0.25
    assert metrics["alignment/lag_2/mean_abs_dlogp"] == 2
    report.begin_step()
    report.add_errors(["logprobs_shifted"])
    assert report.step.metrics()["alignment/errors/logprobs_shifted"] == 1
    assert report.step.episodes == 0
    assert (report.whole.episodes, report.whole.errors["logprobs_shifted"]) == (1, 1)


def test_a_report_is_read_back() -> None:
    report = filled()
    report.add_finding(Finding("logprob_gap", "much"), step=3)
    data = json.loads(json.dumps(report.as_json()))
    again = AlignmentReport.from_json(data)
    assert again.as_json() == report.as_json()
    assert AlignmentReport.from_json({}).as_json() == AlignmentReport().as_json()
    assert AlignmentReport.from_json({"episodes": 3, "max_abs_dlogp": 0.5}).whole.episodes == 3


def test_a_report_is_said_in_words() -> None:
    report = filled()
    assert explain(report)[0].startswith("clean:")
    alone = AlignmentReport()
    alone.add_episode(make_episode([make_call(None, [1], [2, 3])]))
    assert not any("fewer tokens" in line for line in explain(alone)), "one call is not merged with another"
    report.add_errors(["logprobs_shifted", "logprobs_shifted"])
    report.add_warnings({"top_p": 4})
    report.add_finding(Finding("logprobs_shifted", "they come 1 token too late"), step=3)
    lines = explain(report)
    assert lines[0] == "step 3: logprobs_shifted: they come 1 token too late"
    assert lines[1] == f"not trained, 2x logprobs_shifted: {ERRORS['logprobs_shifted']}"
    assert lines[2] == f"warning, 4x top_p: {WARNINGS['top_p']}"
    assert "4 tokens sampled, 4 trained, in 2.00 sequences per episode; 1.5 times fewer" in lines[3]
    assert not any("clean" in line for line in lines)


def test_constrained_tokens_are_counted_by_what_a_grammar_did() -> None:
    report = AlignmentReport()
    first = make_call(None, [1], [2, 3, 4, 5], constrained=bytes([0, 1, 2, 2]))
    episode = make_episode([first, make_call(first, [6], [7])])
    report.add_episode(episode)
    report.add_trained(episode.rollouts[0])
    report.add_warnings(find_warnings(episode.rollouts[0]))
    metrics = report.step.metrics()
    assert metrics["alignment/constrained/cut"] == 0.2
    assert metrics["alignment/constrained/forced"] == 0.4
    assert (metrics["alignment/tokens_trained"], metrics["alignment/warnings/constrained"]) == (2, 1)
    assert "3 of 5 sampled tokens (60%) were constrained by a grammar: 1 cut, 2 forced" in explain(report)
    assert AlignmentReport.from_json(report.as_json()).whole.constrained == {"cut": 1, "forced": 2}


def test_a_constrained_token_is_an_error_on_request() -> None:
    rollout = one(make_call(None, [1], [2, 3], constrained=bytes([0, 1])))
    assert find_errors(rollout, vocabulary=10) == []
    assert find_errors(rollout, vocabulary=10, refuse_constrained=True) == ["constrained"]
    assert find_errors(plain(), vocabulary=10, refuse_constrained=True) == []


def test_constrained_is_one_kind_for_each_token() -> None:
    for wrong in (bytes([0]), bytes([0, 0, 4])):
        with pytest.raises(ValueError, match="`constrained` needs one of"):
            make_call(None, [1], [2, 3, 4], constrained=wrong)


def test_siblings_of_an_unknown_grammar_are_not_compared() -> None:
    """Their probabilities are of what each grammar left."""
    for kinds, contradict in ((b"", True), (bytes([3] * 10), False)):
        found = Contradictions()
        calls = [
            make_call(None, [1], [5] * 10, logprobs=[-1.0 - number] * 10, constrained=kinds)
            for number in range(12)
        ]
        found.add(rollout for call in calls for rollout in make_episode([call]).rollouts)
        assert (found.finding(threshold=0.1) is not None) == contradict


def test_the_page_names_every_error_and_warning() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    for name, meaning in [*ERRORS.items(), *WARNINGS.items()]:
        assert re.search(rf"^\| `{name}` \| {re.escape(meaning)} \|$", page, re.MULTILINE), name
