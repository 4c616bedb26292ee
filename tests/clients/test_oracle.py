"""The oracle finds what it is there to find."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from oracle import STOP_IDS, check_exact
from scripted_model import Logged

from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs

END = STOP_IDS[0]
PROMPT, FIRST, TAIL, SECOND = [1, 2, 3], [4, END], [6], [7, 8, END]


def logprobs(ids: list[int]) -> bytes:
    return pack_logprobs([-0.5 - index for index, _ in enumerate(ids)])


def call(name: str, parent: str | None, new_prompt: list[int], sampled: list[int]) -> Call:
    return Call(
        call_id=name,
        parent_id=parent,
        matched_by="ids" if parent else None,
        new_prompt=pack_ids(new_prompt),
        sampled=pack_ids(sampled),
        logprobs=logprobs(sampled),
        stop_reason="stop",
        policy_version=0,
    )


CALLS = [call("a", None, PROMPT, FIRST), call("b", "a", TAIL, SECOND)]
LOG = [
    Logged(pack_ids(PROMPT), pack_ids(FIRST), logprobs(FIRST)),
    Logged(pack_ids(PROMPT + FIRST + TAIL), pack_ids(SECOND), logprobs(SECOND)),
]


@pytest.mark.parametrize(
    ("calls", "log"),
    [
        (CALLS[:1], LOG),
        (CALLS, LOG[:1]),
        ([*CALLS, call("c", None, PROMPT, FIRST)], LOG),
        ([CALLS[0], call("b", None, PROMPT + FIRST + TAIL + [0], SECOND)], LOG),
        ([CALLS[0], msgspec.structs.replace(CALLS[1], logprobs=logprobs(SECOND)[::-1])], LOG),
        ([CALLS[0], msgspec.structs.replace(CALLS[1], sampled=pack_ids([8, 7, END]))], LOG),
        ([CALLS[0], msgspec.structs.replace(CALLS[1], matched_by=None)], LOG),
        (CALLS, [LOG[0], replace(LOG[1], prompt=pack_ids(PROMPT + TAIL))]),
        ([msgspec.structs.replace(each, temperature=0.0) for each in CALLS], LOG),
        ([msgspec.structs.replace(each, prompt_from="client") for each in CALLS], LOG),
    ],
    ids=[
        "call missing",
        "sample missing",
        "recorded twice",
        "other prompt",
        "logprobs reversed",
        "other ids",
        "found by nothing",
        "sampled after another prompt",
        "alignment error",
        "alignment warning",
    ],
)
def test_what_is_not_exact_fails(calls: list[Call], log: list[Logged]) -> None:
    check_exact(CALLS, LOG, sequences=1)
    with pytest.raises(AssertionError):
        check_exact(calls, log, sequences=1)


def test_two_sequences_are_not_one() -> None:
    apart = [CALLS[0], call("b", None, [9, 9], SECOND)]
    log = [LOG[0], Logged(pack_ids([9, 9]), pack_ids(SECOND), logprobs(SECOND))]
    check_exact(apart, log, sequences=2)
    with pytest.raises(AssertionError):
        check_exact(apart, log, sequences=1)
