"""Chats become datums: which tokens train, what is held out, what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook.renderers import get_renderer
from transformers import AutoTokenizer

from chat_families import FAMILIES
from tinkerscript.config import EngineConfig, RunConfig, SftConfig
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.chats import Chats, evenly_weighted, load_chats
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.sft import check_origin

TOKENIZER: Any = AutoTokenizer.from_pretrained(TINY_MODEL, local_files_only=True)


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}+1?"},
            {"role": "assistant", "content": str(number + 1), **more},
        ]
    }


def config(tmp_path: Path, lines: list[Any], **sft: Any) -> RunConfig:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return RunConfig.model_validate(
        {"method": "sft", "sft": {"data": str(path), "held_out": 0, "batch_size": 4, **sft}}
    )


def load(tmp_path: Path, lines: list[Any], **sft: Any) -> Chats:
    return load_chats(config(tmp_path, lines, **sft), TINY_MODEL)


def texts(chats: Chats) -> list[str]:
    return [TOKENIZER.decode(d.model_input.to_ints()) for chat in chats.train for d in chat.datums]


def batch(chats: Chats, step: int) -> list[tinker.Datum]:
    """A step's datums, as they train."""
    return evenly_weighted([datum for chat in chats.batch(step) for datum in chat.datums])


def test_the_replies_train_after_the_prompt_that_the_policy_gets(tmp_path: Path) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "6"},
    ]
    [[datum]] = (each.datums for each in load(tmp_path, [{"messages": messages}]).train)
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    assert TOKENIZER.decode(targets[weights == 1].tolist()) == "4<|im_end|>6<|im_end|>"
    prompt = get_renderer("qwen3_instruct", TOKENIZER).build_generation_prompt(messages[:3]).to_ints()
    whole = [*datum.model_input.to_ints(), int(targets[-1])]
    assert whole[: len(prompt)] == prompt


def test_epochs_are_shuffles_of_all_chats_and_held_out_ones_never_train(tmp_path: Path) -> None:
    chats = load(tmp_path, [chat(i) for i in range(23)], held_out=5, epochs=2)
    assert (len(chats.train), len(chats.held_out), chats.steps_per_epoch, chats.steps) == (18, 5, 5, 10)

    def epoch(steps: range) -> list[tuple[int, ...]]:
        return [tuple(d.model_input.to_ints()) for step in steps for d in batch(chats, step)]

    first, second = epoch(range(1, 6)), epoch(range(6, 11))
    assert len(set(first)) == 18
    assert sorted(first) == sorted(second)
    assert first != second
    assert not {tuple(d.model_input.to_ints()) for chat in chats.held_out for d in chat.datums} & set(first)
    again = load(tmp_path, [chat(i) for i in range(23)], held_out=5, epochs=2)
    assert [d.model_input for d in batch(again, 7)] == [d.model_input for d in batch(chats, 7)]


def test_a_batchs_weights_sum_to_one(tmp_path: Path) -> None:
    chats = load(tmp_path, [chat(i) for i in (1, 10, 100, 1000)])
    weights = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in batch(chats, 1)])
    assert weights.sum() == pytest.approx(1)
    assert len(set(weights[weights > 0].tolist())) == 1, "each trained token weighs the same"


def test_what_is_too_long_is_left_out_and_never_cut(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "1"}]}
    chats = load(tmp_path, [chat(1), long, chat(2)], max_tokens=60)
    assert (len(chats.train), chats.left_out) == (2, 1)
    assert all("x" not in text for text in texts(chats))
    assert chats.longest <= 60
    with pytest.raises(ConfigError, match=r"sft.held_out: 2 chats .* has 2 of at most 60 tokens"):
        load(tmp_path, [chat(1), long, chat(2)], max_tokens=60, held_out=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the line is not valid JSON"),
        ({**chat(2), "tools": [{"type": "function"}]}, "line 2: missing .* 'tools.0..function'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "line 2: a message of the role 'user' needs content",
        ),
        ({"text": "hello"}, "line 2: missing .* 'messages'"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "unknown .* 'messages.0..mood'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: it has no assistant reply to train on"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"sft.data: .*chats\.jsonl, {message}|sft.data: .*{message}"):
        load(tmp_path, [chat(1), line])


def test_separators_of_unicode_are_part_of_a_line(tmp_path: Path) -> None:
    said = chat(1, content="a\u2028b\u0085c")
    chats = load(tmp_path, [json.dumps(said, ensure_ascii=False), {**chat(2), "tools": [], "id": 7}])
    assert len(chats.train) == 2
    assert "a\u2028b\u0085c" in texts(chats)[0]


def test_a_message_that_calls_a_tool_needs_no_content(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"type": "function", "id": "c", "function": function}]
    empty, null = (chat(1, content=content, tool_calls=calls) for content in ("", None))
    absent = chat(1, tool_calls=calls)
    del absent["messages"][1]["content"]
    first, *others = texts(load(tmp_path, [empty, null, absent]))
    assert '"name": "add"' in first
    assert others == [first, first]


def test_reasoning_trains_where_the_chat_format_has_it(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].write(tmp_path / "model")
    reasoned = chat(1, reasoning_content="hm")
    twice = {"messages": reasoned["messages"] * 2}
    made = config(tmp_path, [reasoned, twice]).model_copy(update={"engine": EngineConfig(model=str(folder))})
    first, second = (each.datums for each in load_chats(made, folder).train)
    tokenizer = LightTokenizer(folder)
    assert [tokenizer.decode(_trained(datum)) for datum in first] == ["<think>\nhm\n</think>\n\n2<|im_end|>"]
    assert len(second) == 2, "the second question strips the reasoning of the first answer"


def _trained(datum: Any) -> list[int]:
    weights, targets = (datum.loss_fn_inputs[name].to_numpy() for name in ("weights", "target_tokens"))
    return [int(token) for token in targets[weights == 1]]


def test_a_run_goes_on_with_the_chats_that_it_began_with_alone(tmp_path: Path) -> None:
    def run(lines: list[Any], **sft: Any) -> None:
        made = config(tmp_path, lines, **sft)
        chats = load_chats(made, TINY_MODEL)
        folder = RunFolder(made, TINY_MODEL, now=datetime.now(), path=tmp_path / "run")
        try:
            check_origin(folder, chats)
        finally:
            folder.close()

    lines = [chat(i) for i in range(9)]
    run(lines, held_out=2)
    run(lines, held_out=2, epochs=3)
    with pytest.raises(ConfigError, match=r"the file of sft\.data changed since the run in .*run began"):
        run([*lines, chat(9)], held_out=2)
    with pytest.raises(ConfigError, match=r"sft\.held_out changed since"):
        run(lines, held_out=3)


def test_data_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft.data is needed"):
        load_chats(RunConfig(method="sft"), TINY_MODEL)
    nowhere = SftConfig(data=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"sft.data: cannot read .*nowhere"):
        load_chats(RunConfig(method="sft", sft=nowhere), TINY_MODEL)


def test_a_model_without_a_chat_format_is_refused(tmp_path: Path) -> None:
    folder = FAMILIES["llama3.1"].write(tmp_path / "llama")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        load_chats(config(tmp_path, [chat(1)]), folder)
