"""How tokens go wrong in a reply that a client reads: each test is one failure mode of docs/tokens.md.

Each outcome is exact, or refused, or labelled and counted. DeepSeek's vocabulary stands for real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx import InferenceContext, InferenceTurn
from vocabularies import deepseek

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def templated(byte_model: Path, template: str = TEMPLATE) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_file=str(byte_model / "tokenizer.json"))
    made.chat_template = template
    return made


@pytest.fixture
def context(byte_model: Path) -> InferenceContext:
    return InferenceContext(templated(byte_model))


@pytest.fixture(scope="module")
def real() -> Any:
    return deepseek()


def encoded(tokenizer: Any, *texts: str) -> list[int]:
    """The ids of texts that were sampled one after the other."""
    return [number for text in texts for number in tokenizer.encode(text, add_special_tokens=False)]


def reply(ids: list[int], tokens: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """A choice with log probabilities of -0.5; `tokens` are the entries' texts."""
    entries = [{"token": token, "logprob": -0.5} for token in tokens or ["?"] * len(ids)]
    said = {"message": {"content": "?"}, "finish_reason": "stop"}
    return said | {"logprobs": {"content": entries}, "token_ids": ids} | fields


def text_reply(tokens: list[str], text: str) -> dict[str, Any]:
    entries = [{"token": token, "logprob": -0.5, "bytes": list(token.encode())} for token in tokens]
    return {"message": {"content": text}, "logprobs": {"content": entries}}


def test_encoding_the_text_gives_other_ids(real: Any) -> None:
    """'H|AVING' comes back as 'HA|V|ING': read if the server reports ids, refused if it reports text."""
    sampled = encoded(real, "H", "AVING")
    assert encoded(real, "HAVING") != sampled
    context = InferenceContext(real)
    assert context.response_tokens_from_choice(reply(sampled)).tolist() == sampled
    with pytest.raises(AlignmentError, match="text does not determine ids"):
        context.response_tokens_from_choice(text_reply(["H", "AV", "ING"], "HAVING"))


def test_tokens_merge_across_a_seam(real: Any) -> None:
    """Encoded together, "ok\\n" and "\\n\\nmore" have one token at the seam: that is a new sequence."""
    prompt, sampled, tail = encoded(real, "Say ok."), encoded(real, "ok\n"), encoded(real, "\n\nmore")
    together = prompt + encoded(real, "ok\n\n\nmore")
    assert together[: len(prompt + sampled)] != prompt + sampled
    for second, sequences in ((prompt + sampled + tail, 1), (together, 2)):
        context = InferenceContext(real)
        turns = [InferenceTurn(prompt, reply(sampled)), InferenceTurn(second, reply([5, 6]))]
        rollouts = context.create_rollouts_from_turns(turns, "e", "x", 1.0)
        assert len(rollouts) == sequences
        assert context.warnings["prefix_broken"] == sequences - 1
        assert rollouts[-1].tokens[: len(second)].tolist() == second


def test_a_byte_is_read_as_the_letter_that_spells_it(real: Any) -> None:
    """The text 'é' looks up as the piece of the byte 0xE9."""
    number = real.convert_tokens_to_ids("é")
    assert real.decode([number]) != "é"
    with pytest.raises(AlignmentError, match="do not decode to the choice's text"):
        InferenceContext(real).response_tokens_from_choice(text_reply(["é"], "é"))


def test_unknown_text_is_read_as_id_0(byte_model: Path) -> None:
    """Tokenizers with an unknown token give its id for anything that they do not know."""
    made = templated(byte_model)
    made.add_special_tokens({"unk_token": "<|endoftext|>"})
    unknown = made.convert_tokens_to_ids(" never a piece")
    assert unknown == made.unk_token_id
    with pytest.raises(AlignmentError, match="' never a piece' is not a piece"):
        InferenceContext(made).response_tokens_from_choice(text_reply([" never a piece"], " never a piece"))


def test_bytes_are_text_encoded_again(real: Any) -> None:
    """vLLM's `bytes` of a part of a character are those of U+FFFD: two tokens, one spelling."""
    sampled = [number for number in range(1000) if real.decode([number]) == "\ufffd"][:2]
    choice = text_reply([real.decode([number]) for number in sampled], real.decode(sampled))
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xEF, 0xBF, 0xBD]] * 2
    with pytest.raises(AlignmentError):
        InferenceContext(real).response_tokens_from_choice(choice)


def test_a_piece_is_decoded_in_its_context(real: Any) -> None:
    """Newer vLLM shows the whole character at its last byte, and nothing before it."""
    sampled = real.convert_tokens_to_ids(["Ã", "©"])
    assert real.decode(sampled) == "é"
    with pytest.raises(AlignmentError, match="'' is not a piece"):
        InferenceContext(real).response_tokens_from_choice(text_reply(["", "é"], "é"))


def test_ids_are_encoded_again_beside_the_wires_logprobs(context: InferenceContext) -> None:
    choice = reply([1, 2, 3], ["a", "b", "c", "d"])
    with pytest.raises(AlignmentError, match=r"3 token ids .* 4 log probabilities"):
        context.create_rollout_from_choice("x", choice, "e", "x", 1.0)


def test_two_sources_of_ids_disagree(context: InferenceContext) -> None:
    choice = reply([1, 2])
    for entry, number in zip(choice["logprobs"]["content"], (1, 3), strict=True):
        entry["token_id"] = number
    with pytest.raises(AlignmentError, match="from token_ids and from logprobs_token_id differ"):
        context.response_tokens_from_choice(choice)


def test_a_template_strips_thinking_from_earlier_turns(byte_model: Path) -> None:
    """The prefix breaks at the next turn: two sequences, counted, each as the model saw it."""
    template = TEMPLATE.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    made = templated(byte_model, template)
    context = InferenceContext(made)
    sampled = encoded(made, "<think>hm</think>yes", "<|im_end|>")
    history = [{"role": "user", "content": "hi"}]
    said = {"role": "assistant", "content": "<think>hm</think>yes"}
    more = [*history, said, {"role": "user", "content": "x"}]
    turns = [InferenceTurn(history, reply(sampled)), InferenceTurn(more, reply(sampled))]
    rollouts = context.create_rollouts_from_turns(turns, "e", "x", 1.0)
    assert len(rollouts) == 2
    assert context.warnings["prefix_broken"] == 1
    assert "<think>" not in made.decode(rollouts[1].prompt_tokens)
    assert {segment.call.prompt_from for r in rollouts for segment in r.segments} == {"client"}


def test_the_template_gives_a_batch_encoding(context: InferenceContext) -> None:
    made = context.tokenizer
    messages = [{"role": "user", "content": "hi"}]
    assert isinstance(made.apply_chat_template(messages, tokenize=True), BatchEncoding)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert context.tokenize_prompt("hi").tolist() == encoded(made, text)


def test_a_template_that_gives_no_ids_is_refused(
    context: InferenceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that does not know `return_dict` and gives a mapping all the same."""
    made = context.tokenizer
    monkeypatch.setattr(made, "apply_chat_template", lambda *_, **__: BatchEncoding({"input_ids": [1]}))
    with pytest.raises(AlignmentError, match="not a token id"):
        context.tokenize_prompt("hi")


def test_role_and_content_stand_in_for_a_template(byte_model: Path) -> None:
    """Other ids, in silence elsewhere: here an error, unless the format is asked for by name."""
    bare = PreTrainedTokenizerFast(tokenizer_file=str(byte_model / "tokenizer.json"))
    with pytest.raises(AlignmentError, match="no chat template"):
        InferenceContext(bare).tokenize_prompt("hi")
    plain = InferenceContext(bare, prompt_format="plain").tokenize_prompt("hi")
    assert plain.tolist() == encoded(bare, "user: hi")
    assert plain.tolist() != InferenceContext(templated(byte_model)).tokenize_prompt("hi").tolist()


def test_the_beginning_token_stands_twice(byte_model: Path) -> None:
    """The template writes it, and the tokenizer would add its own."""
    made = templated(byte_model, "<|endoftext|>" + TEMPLATE)
    begin = made.convert_tokens_to_ids("<|endoftext|>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    assert made("<|endoftext|>x").input_ids.count(begin) == 2
    assert InferenceContext(made).tokenize_prompt("hi").tolist().count(begin) == 1


@pytest.mark.parametrize(
    ("server", "args"),
    [
        ("<|im_start|>system\nBe helpful.<|im_end|>\n" + TEMPLATE, {}),
        ("<|im_start|>system\nToday: {{ day }}<|im_end|>\n" + TEMPLATE, {"day": "2026-01-31"}),
    ],
    ids=["system_prompt", "date"],
)
def test_a_default_system_prompt_or_date(byte_model: Path, server: str, args: dict[str, str]) -> None:
    """The server's prompt wins; that ours differs is counted."""
    theirs = InferenceContext(templated(byte_model, server)).tokenize_prompt("hi", **args).tolist()
    context = InferenceContext(templated(byte_model), template_args=args)
    rollout = context.create_rollout_from_choice("hi", reply([1], prompt_token_ids=theirs), "e", "x", 1.0)
    assert rollout.prompt_tokens.tolist() == theirs
    assert context.warnings["prompt_differs_from_local_rendering"] == 1


def test_the_generation_prompt_differs(byte_model: Path) -> None:
    """`enable_thinking=False` adds an empty think block: rendered alike only with the server's arguments."""
    block = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    made = templated(byte_model, TEMPLATE + block)
    theirs = InferenceContext(made).tokenize_prompt("hi", enable_thinking=False).tolist()
    choice = reply([1, 2, 3, 4, 5], prompt_token_ids=theirs)
    for args, differs in (({}, 1), ({"enable_thinking": False}, 0)):
        context = InferenceContext(made, template_args=args)
        rollout = context.create_rollout_from_choice("hi", choice, "e", "x", 1.0)
        assert rollout.prompt_tokens.tolist() == theirs
        assert context.warnings["prompt_differs_from_local_rendering"] == differs


def test_tools_are_left_out_of_a_local_rendering(byte_model: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    made = templated(byte_model, "{% if tools %}tools: {{ tools | length }}\n{% endif %}" + TEMPLATE)
    theirs = InferenceContext(made).tokenize_prompt("hi", tools=tools).tolist()
    choice = reply([1, 2, 3, 4, 5], prompt_token_ids=theirs)
    for given, differs in ((None, 1), (tools, 0)):
        context = InferenceContext(made)
        rollout = context.create_rollout_from_choice("hi", choice, "e", "x", 1.0, tools=given)
        assert rollout.prompt_tokens.tolist() == theirs
        assert context.warnings["prompt_differs_from_local_rendering"] == differs


def test_a_prompt_rendered_by_the_client_is_labelled(context: InferenceContext) -> None:
    rollout = context.create_rollout_from_choice("hi", reply([1]), "e", "x", 1.0)
    assert rollout.segments[0].call.prompt_from == "client"
    assert context.warnings["prompt_rendered_by_the_client"] == 1


def test_short_responses_and_zero_logprobs(context: InferenceContext) -> None:
    choice = reply([1])
    choice["logprobs"]["content"][0]["logprob"] = 0.0
    rollout = context.create_rollout_from_choice([5], choice, "e", "x", 1.0)
    assert dict(context.warnings) == {"short_response": 1, "logprobs_all_zero": 1}
    np.testing.assert_array_equal(rollout.response_logprobs, [0.0])
