"""`InferenceContext`: ids are read or refused; the server's prompt wins; what is suspicious is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerFast

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx import InferenceContext, InferenceTurn
from tinkerscript.inference_ctx.choices import read_choice
from tinkerscript.rollouts.advantages import evenly
from tinkerscript.rollouts.call import TokenConstraint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}tools:{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(byte_model: Path) -> Any:
    """One token a byte, with Qwen3's markers and a chat template."""
    made = PreTrainedTokenizerFast(tokenizer_file=str(byte_model / "tokenizer.json"))
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def context(tokenizer: Any) -> InferenceContext:
    return InferenceContext(tokenizer)


IDS, LOGPROBS = [72, 105, 33, 40, 41], [-0.1, -0.2, -0.3, -0.4, -0.5]


def content(**more: list[Any]) -> dict[str, Any]:
    """OpenAI's `logprobs`, with more fields for each token."""
    entries = [{"token": "?", "logprob": logprob, "bytes": None, "top_logprobs": []} for logprob in LOGPROBS]
    for name, values in more.items():
        for entry, value in zip(entries, values, strict=True):
            entry[name] = value
    return {"content": entries}


def choice(**fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hi!()"}
    return {"index": 0, "finish_reason": "stop", "message": message} | fields


def one_id(token: int, logprob: float = -1.0, **fields: Any) -> dict[str, Any]:
    return choice(token_ids=[token], logprobs={"content": [{"token": "a", "logprob": logprob}]}, **fields)


REPLIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_ids": (choice(token_ids=IDS, logprobs=content()), {"prompt_token_ids": [1, 2]}),
    "logprobs_token_id": (choice(logprobs=content(token_id=IDS)), {"prompt_token_ids": [1, 2]}),
    "token_id_text": (
        choice(logprobs=content(token=[f"token_id:{token}" for token in IDS])),
        {"prompt_token_ids": [1, 2]},
    ),
}
"""Choices, and the responses around them."""


@pytest.mark.parametrize("source", REPLIES)
def test_ids_are_read_where_each_server_puts_them(source: str) -> None:
    """Of an OpenAI object too."""
    given, response = REPLIES[source]
    whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [given]}
    completion = ChatCompletion.model_validate(whole | response)
    for found in (
        read_choice(given, response=response),
        read_choice(completion.choices[0], response=completion),
    ):
        assert (found.ids_from, found.ids.tolist(), found.ids.dtype) == (source, IDS, np.int32)
        assert found.logprobs is not None
        np.testing.assert_allclose(found.logprobs, LOGPROBS, rtol=1e-6)
        assert found.prompt_ids is not None
        assert found.prompt_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("given", "response", "said"),
    [
        (choice(token_ids=IDS, logprobs=content(token_id=[1, 2, 3, 4, 5])), {}, "differ"),
        (choice(token_ids=IDS[:4], logprobs=content()), {}, "4 token ids .* 5 log probabilities"),
        (choice(token_ids=[], logprobs=None), {}, "no tokens"),
        (choice(token_ids=[1, -1], logprobs=None), {}, "not a token id"),
        (choice(token_ids=[1, 2.5], logprobs=None), {}, "not a token id"),
        (choice(logprobs=None), {}, "logprobs=True"),
        (choice(logprobs=content(token_id=[1, 2, 3, 4, None])), {}, "4 of 5"),
        (choice(token_ids=[1], logprobs={"content": [{"logprob": None}]}), {}, "not all numbers"),
        (choice(token_ids=[1], prompt_token_ids=[1]), {"prompt_token_ids": [2]}, "two places"),
        (choice(logprobs=content()), {}, "text does not determine ids"),
    ],
)
def test_what_is_missing_or_disagrees_is_refused(
    given: dict[str, Any], response: dict[str, Any], said: str
) -> None:
    with pytest.raises(AlignmentError, match=said):
        read_choice(given, response=response)


def piece_choice(tokens: list[str], text: str | None) -> dict[str, Any]:
    entries = [{"token": token, "logprob": -1.0} for token in tokens]
    return choice(logprobs={"content": entries}, message={"role": "assistant", "content": text})


def test_the_prompt_has_the_template_around_it(context: InferenceContext, tokenizer: Any) -> None:
    ids = context.tokenize_prompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    )
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert "tools:1" in tokenizer.decode(
        context.tokenize_prompt([{"role": "user", "content": "x"}], tools=tools)
    )


def test_a_missing_template_is_an_error_unless_the_plain_format_is_named(byte_model: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_file=str(byte_model / "tokenizer.json"))
    with pytest.raises(AlignmentError, match="prompt_format='plain'"):
        InferenceContext(bare).tokenize_prompt("hi")
    plain = InferenceContext(bare, prompt_format="plain")
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert bare.decode(plain.tokenize_prompt(said)) == "system: s\nuser: hi"


def test_a_choice_becomes_the_documents_rollout(context: InferenceContext) -> None:
    given, _ = REPLIES["token_ids"]
    prompt_ids = context.tokenize_prompt("2+2?").tolist()
    rollout = context.create_rollout_from_choice(
        prompt="2+2?",
        choice=given,
        response={"prompt_token_ids": prompt_ids},
        env_name="gsm8k",
        env_example_id="ex_123",
        reward=0.5,
    )
    assert rollout.prompt_tokens.tolist() == prompt_ids
    assert rollout.response_tokens.tolist() == IDS
    np.testing.assert_allclose(rollout.response_logprobs, LOGPROBS, rtol=1e-6)
    assert rollout.token_rewards.tolist() == [0.5] * len(IDS)
    assert rollout.episode_reward == 0.5
    assert (rollout.env_name, rollout.env_example_id) == ("gsm8k", "ex_123")
    assert rollout.segments[0].call.ids_from == "token_ids"
    assert not context.warnings


def test_the_servers_prompt_wins_and_a_difference_is_counted(context: InferenceContext) -> None:
    given, response = REPLIES["token_ids"]
    rollout = context.create_rollout_from_choice("2+2?", given, "e", "x", 1.0, response=response)
    assert rollout.prompt_tokens.tolist() == [1, 2]
    assert rollout.segments[0].call.prompt_from == "server"
    assert context.warnings == {"prompt_differs_from_local_rendering": 1}
    rendered = context.create_rollout_from_choice("2+2?", given, "e", "x", 1.0)
    assert rendered.segments[0].call.prompt_from == "client"
    assert context.warnings["prompt_rendered_by_the_client"] == 1


def test_suspicious_responses_are_counted_and_let_through(context: InferenceContext) -> None:
    given, response = REPLIES["token_ids"]
    for tokens, warned in ((len(IDS), 0), (len(IDS) + 1, 1)):
        reply = response | {"choices": [given], "usage": {"completion_tokens": tokens}}
        context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0, response=reply)
        assert context.warnings["usage_differs"] == warned
    context.create_rollout_from_choice([1], one_id(5, 0.0), "e", "x", 1.0)
    assert context.warnings["short_response"] == 1
    assert context.warnings["logprobs_all_zero"] == 1


def test_equal_siblings_of_one_reply_are_distinct_rollouts(context: InferenceContext) -> None:
    given, response = REPLIES["token_ids"]
    reply = response | {"choices": [given, given]}
    rewards = [
        context.create_rollout_from_choice("x", each, "e", "x", reward, response=reply).episode_reward
        for each, reward in zip(reply["choices"], (1.0, 0.0), strict=True)
    ]
    assert rewards == [1.0, 0.0]
    both = context.to_inference_response("x", reply)
    assert [each.response_text for each in both.choices] == ["Hi!()", "Hi!()"]
    assert both.prompt_tokens.tolist() == [1, 2]


def test_completions_are_read(context: InferenceContext) -> None:
    given = {
        "index": 0,
        "finish_reason": "stop",
        "text": "hello w",
        "logprobs": {"tokens": ["hello", "Ġ", "w"], "token_logprobs": [-0.1, -0.2, -0.3]},
    }
    rollout = context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0)
    assert rollout.segments[0].call.ids_from == "pieces"
    np.testing.assert_allclose(rollout.response_logprobs, [-0.1, -0.2, -0.3], rtol=1e-6)


def test_ids_that_were_sent_are_the_prompt(context: InferenceContext) -> None:
    given, response = REPLIES["token_ids"]
    for prompt in ([1, 2], np.array([1, 2], np.int32)):
        rollout = context.create_rollout_from_choice(prompt, given, "e", "x", 1.0)
        assert rollout.prompt_tokens.tolist() == [1, 2]
        assert rollout.segments[0].call.prompt_from == "server"
    assert not context.warnings
    with pytest.raises(AlignmentError, match="2 prompt ids, which are not the 3 given"):
        context.create_rollout_from_choice([1, 2, 3], given, "e", "x", 1.0, response=response)


def turn(prompt: list[int], ids: list[int]) -> InferenceTurn:
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    return InferenceTurn("said", choice(token_ids=ids, logprobs=logprobs, prompt_token_ids=prompt))


def test_a_conversation_is_one_rollout_where_each_prompt_extends_the_last(context: InferenceContext) -> None:
    """Its reward may be a function of it."""
    turns = [turn([1, 2], [10, 11]), turn([1, 2, 10, 11, 3], [12])]
    for reward in (1.0, lambda rollout: evenly(rollout, 3)):
        (rollout,) = context.create_rollouts_from_turns(turns, "e", "x", reward)
        assert rollout.tokens.tolist() == [1, 2, 10, 11, 3, 12]
        assert rollout.response_mask.tolist() == [True, True, False, True]
        assert rollout.token_rewards.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_a_broken_prefix_forks_and_is_counted(context: InferenceContext) -> None:
    turns = [turn([1, 2], [10, 11]), turn([1, 2, 10, 9, 3], [12])]
    rollouts = context.create_rollouts_from_turns(turns, "e", "x", 1.0)
    assert [rollout.tokens.tolist() for rollout in rollouts] == [[1, 2, 10, 11], [1, 2, 10, 9, 3, 12]]
    assert context.warnings["prefix_broken"] == 1


# What a reply may not be, and what a request says


@pytest.mark.parametrize(
    ("logprobs", "name"),
    [
        ([-0.5, float("-inf")], "logprob_not_finite"),
        ([0.5, -0.5], "logprob_positive"),
        ([-0.5, -9999.0], "logprob_sentinel"),
    ],
)
def test_a_logprob_of_no_probability_is_refused(logprobs: list[float], name: str) -> None:
    given = choice(token_ids=[1, 2], logprobs={"tokens": ["a", "b"], "token_logprobs": logprobs})
    with pytest.raises(AlignmentError, match="the choice has the logprob") as error:
        read_choice(given)
    assert error.value.name == name


def test_ids_beyond_the_vocabulary_are_refused(context: InferenceContext, tokenizer: Any) -> None:
    size = len(tokenizer)
    for ids, prompt in (([size], [1]), ([1], [size])):
        given = one_id(*ids, prompt_token_ids=prompt)
        with pytest.raises(AlignmentError, match=f"id {size} is not in the vocabulary of {size}"):
            context.create_rollout_from_choice(prompt, given, "e", "x", 1.0)
        larger = InferenceContext(tokenizer, vocabulary=size + 1)
        made = larger.create_rollout_from_choice(prompt, given, "e", "x", 1.0)
        assert made.response_tokens.tolist() == ids


@pytest.mark.parametrize("reason", [None, "abort", {"type": "abort"}])
def test_a_reply_that_did_not_end_is_refused(context: InferenceContext, reason: object) -> None:
    given = REPLIES["token_ids"][0] | {"finish_reason": reason}
    with pytest.raises(AlignmentError, match="finish reason is"):
        context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0)


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("tool_calls", False), ("length", True)])
def test_a_rollout_says_whether_it_was_cut_off(
    context: InferenceContext, reason: str, truncated: bool
) -> None:
    given = REPLIES["token_ids"][0] | {"finish_reason": reason}
    assert context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0).is_truncated == truncated


SHARES = [0.0, 0.0, 0.25, 0.0, 0.5]


@pytest.mark.parametrize("reward", [np.float32(0.5), np.array(0.5), torch.tensor(0.5).requires_grad_()])
def test_a_reward_may_be_a_scalar_of_any_library(context: InferenceContext, reward: Any) -> None:
    rollout = context.create_rollout_from_choice([1, 2], REPLIES["token_ids"][0], "e", "x", reward)
    assert (rollout.episode_reward, rollout.shaped) == (0.5, False)
    assert rollout.token_rewards.tolist() == [0.5] * len(IDS)


@pytest.mark.parametrize("shares", [SHARES, torch.tensor(SHARES, dtype=torch.bfloat16)])
def test_token_rewards_are_one_for_each_response_token(context: InferenceContext, shares: Any) -> None:
    rollout = context.create_rollout_from_choice([1, 2], REPLIES["token_ids"][0], "e", "x", shares)
    assert rollout.token_rewards.tolist() == SHARES
    assert rollout.episode_reward == 0.75


@pytest.mark.parametrize(
    "reward",
    ["1.0", None, object(), 1 + 2j, float("inf"), [[1.0] * 5], [None] * 5, [1.0], [float("nan")] * 5],
)
def test_what_is_no_reward_is_refused(context: InferenceContext, reward: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        context.create_rollout_from_choice([1, 2], REPLIES["token_ids"][0], "e", "x", reward)


def test_an_empty_prompt_is_refused(context: InferenceContext) -> None:
    given = REPLIES["token_ids"][0]
    with pytest.raises(AlignmentError, match="the prompt is empty"):
        context.create_rollout_from_choice(np.array([], np.int32), given, "e", "x", 1.0)
    with pytest.raises(AlignmentError, match="empty prompt"):
        context.create_rollout_from_choice("x", given | {"prompt_token_ids": []}, "e", "x", 1.0)


@pytest.mark.parametrize(
    ("tokens", "text"), [(["h", "e", "l"], "hel"), (["h", "i"], None), (["é"], "\ufffd")]
)
def test_a_server_may_be_declared_to_send_pieces(tokenizer: Any, tokens: list[str], text: str | None) -> None:
    """Plain answers spell the same as text and as pieces: only the caller can know."""
    declared = InferenceContext(tokenizer, raw_pieces=True)
    found = declared.tokens_from_choice(piece_choice(tokens, text))
    assert (found.ids.tolist(), found.ids_from) == (tokenizer.convert_tokens_to_ids(tokens), "pieces")


@pytest.mark.parametrize(
    ("tokens", "text"), [(["é"], "é"), (["h", " w"], "h w"), (["h", "i"], "ho"), (["unknown"], "unknown")]
)
def test_declared_pieces_that_are_text_are_noticed(tokenizer: Any, tokens: list[str], text: str) -> None:
    with pytest.raises(AlignmentError, match="piece"):
        InferenceContext(tokenizer, raw_pieces=True).tokens_from_choice(piece_choice(tokens, text))


UNKNOWN = [TokenConstraint.UNKNOWN] * len(IDS)


@pytest.mark.parametrize(
    ("request_fields", "constrained"),
    [
        ({}, []),
        ({"response_format": {"type": "text"}, "tool_choice": "auto"}, []),
        ({"response_format": {"type": "json_object"}}, UNKNOWN),
        ({"tool_choice": "required"}, UNKNOWN),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, UNKNOWN),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, UNKNOWN),
        ({"extra_body": {"ebnf": 'root ::= "a"'}}, UNKNOWN),
        ({"logit_bias": {"5": -100}}, UNKNOWN),
    ],
)
def test_a_call_is_constrained_if_its_request_was(
    context: InferenceContext, request_fields: dict[str, Any], constrained: list[int]
) -> None:
    given, response = REPLIES["token_ids"]
    rollout = context.create_rollout_from_choice(
        [1, 2], given, "e", "x", 1.0, response=response, request=request_fields
    )
    call = rollout.segments[0].call
    assert (list(call.constrained), call.logprob_kind) == (constrained, "unknown")
    assert rollout.response_loss_mask.tolist() == [not constrained] * len(IDS)
    free = InferenceContext(context.tokenizer, logprob_kind="processed")
    made = free.create_rollout_from_choice([1, 2], given, "e", "x", 1.0, request=request_fields)
    assert made.segments[0].call.logprob_kind == ("unknown" if constrained else "processed")


def test_a_server_that_tells_is_believed(context: InferenceContext) -> None:
    """Our gateway names what its grammar did to each token."""
    given = choice(token_ids=IDS, logprobs=content(), constrained=[0, 1, 2, 0, 2], prompt_token_ids=[1])
    rollout = context.create_rollout_from_choice(
        [1], given, "e", "x", 1.0, request={"tool_choice": "required"}
    )
    assert rollout.response_loss_mask.tolist() == [True, False, False, True, False]
    for wrong in ([0, 1], [0, 1, 2, 0, 9], ["a"] * 5):
        with pytest.raises(AlignmentError, match="`constrained` is"):
            context.create_rollout_from_choice([1], given | {"constrained": wrong}, "e", "x", 1.0)


def test_what_was_sampled_from_is_on_the_call(context: InferenceContext) -> None:
    request = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "extra_body": {"top_k": 20, "min_p": 0.1}}
    request["extra_body"]["repetition_penalty"] = 1.1
    given = REPLIES["token_ids"][0]
    call = context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0, request=request).segments[0].call
    assert (call.temperature, call.top_p, call.top_k, call.seed) == (0.7, 0.9, 20, 5)
    assert (call.min_p, call.repetition_penalty) == (0.1, 1.1)
    with pytest.raises(AlignmentError, match=r"presence_penalty=0\.5 changes what was sampled"):
        context.create_rollout_from_choice([1, 2], given, "e", "x", 1.0, request={"presence_penalty": 0.5})
