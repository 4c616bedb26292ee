"""A byte-level BPE tokenizer in Qwen3's shape, trained on the text of the chat format and on tool schemas.

Invariant: "\\n" and every digit are tokens of their own, never merged with a neighbour. So a chat has the
same ids whether it is encoded whole or message by message, and any UTF-8 text survives a round trip.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tiny_model.chats import CALCULATORS, LOOKUPS, SMALL_TALK, SYSTEM_PROMPTS
from tiny_model.tools import ORDINARY, schema

VOCABULARY = 768
"""Tokens, a multiple of 8: 256 bytes, the merges, and the nine tokens below."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PAD, EOS = "<|endoftext|>", "<|im_end|>"
CONTEXT = 2048
"""Positions that the model has."""

TEMPLATE_REPEATS = 10
"""How often the fixed text of the chat format is counted, against once for each tool schema."""

CHAT_REPEATS = 4
"""The same for the questions and answers of the training chats."""

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def template_text() -> list[str]:
    """What the chat format writes around any message and any tool, cut where an added token stands."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    call = {"name": "", "arguments": ""}
    roles: list[dict[str, object]] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": ""},
    ]
    text = environment.from_string(TEMPLATE_FILE.read_text()).render(messages=roles, tools=[{}])
    cut = "|".join(map(re.escape, ["\n", *SPECIAL, *ADDED]))
    return [piece for piece in re.split(cut, text) if len(piece) > 1]


def corpus() -> list[str]:
    """The texts that the merges are learnt from; none holds two digits, so none holds a problem."""
    described = [*ORDINARY, *CALCULATORS, *(tool for tool, _ in LOOKUPS)]
    schemas = [json.dumps(schema(tool, strict=i % 2 == 0)) for i, tool in enumerate(described)]
    calls = [f'{{"name": "{name}", "arguments": {{"{ps[0][0]}": "' for name, _, ps in described]
    prose = [text for _, text, _ in described] + [text for _, _, ps in described for _, _, text in ps]
    said = [text for turn in SMALL_TALK for text in turn]
    chat = [*SYSTEM_PROMPTS, "What is ", *(ask for _, ask in LOOKUPS), *said]
    return template_text() * TEMPLATE_REPEATS + schemas + calls + prose + chat * CHAT_REPEATS


def train_tokenizer() -> Tokenizer:
    """The tokenizer, with merges over spaces but not over digits or line ends; deterministic."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    """Write tokenizer.json and tokenizer_config.json, and load them back as transformers will."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE_FILE.read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
