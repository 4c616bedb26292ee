"""Which learning rate and threads a config without them has, and which rate is called too high."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinker_cookbook.hyperparam_utils import get_lr

from tinkerscript.commands.plan import plan
from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import Loss
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.train.defaults import parameters_of, resolved
from tinkerscript.train.policy_loss import loss_config

SMOLLM2 = {
    **{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    **{"max_position_embeddings": 8192},
}
"""SmolLM2-135M's, without its weights."""


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


def made(model: str, **more: Any) -> RunConfig:
    engine = {"model": model, "threads": 1} | more.pop("engine", {})
    return RunConfig.model_validate({"engine": engine, "sampling": {"max_tokens": 8}, **more})


def test_an_unset_rate_goes_by_what_trains(large: str) -> None:
    lora = {"lora": {"rank": 8}}
    rates = {
        "small": resolved(made("tiny"), TINY_MODEL),
        "all": resolved(made(large), Path(large)),
        "lora": resolved(made(large, engine=lora), Path(large)),
        "sft": resolved(made(large, method="sft"), Path(large)),
        "dpo": resolved(made(large, method="sft", sft={"dpo_beta": 0.1}, engine=lora), Path(large)),
        "service": resolved(made(large, engine={"backend": "tinker"}), Path(large)),
    }
    assert {name: config.training.learning_rate for name, (config, _) in rates.items()} == {
        **{"small": 1e-4, "all": 1e-6, "lora": 1.9e-4, "sft": 1e-5, "dpo": 1.9e-4, "service": 1.9e-4}
    }
    assert rates["all"][1] == ["training.learning_rate: 1e-06, the usual one for all weights"]


@pytest.mark.parametrize(("rate", "engine"), [(1e-3, {}), (1e-2, {"lora": {"rank": 8}})])
def test_a_rate_that_ruins_what_trains_is_said_before_the_run(
    large: str, rate: float, engine: dict[str, Any]
) -> None:
    config = made(large, engine=engine, training={"learning_rate": rate})
    kept, (warning,) = resolved(config, Path(large))
    assert kept == config, "it is the user's"
    assert warning.startswith(f"training.learning_rate: {rate:g} is too high for ")
    assert any(warning in line for line in plan(config))
    fine = made(large, engine=engine, training={"learning_rate": rate / 100})
    assert resolved(fine, Path(large)) == (fine, [])


@pytest.mark.parametrize(
    ("family", "name", "rate"),
    [("llama", "meta-llama/Llama-3.1-8B-Instruct", 4e-5), ("qwen3", "Qwen/Qwen3-8B", 6.6e-5)],
)
def test_an_adapter_has_the_rate_of_the_cookbook(large: str, family: str, name: str, rate: float) -> None:
    wide = SMOLLM2 | {"hidden_size": 4096, "model_type": family}
    (Path(large) / "config.json").write_text(json.dumps(wide))

    def chosen(method: str) -> float:
        asked = made(large, engine={"lora": {"rank": 8}}, method=method)
        return resolved(asked, Path(large))[0].training.learning_rate

    assert chosen("sft") == pytest.approx(get_lr(name), rel=0.03)
    assert chosen("grpo") == rate


@pytest.mark.parametrize("width", [576, 4096])
def test_an_adapter_of_another_family_has_one_rate_at_any_width(large: str, width: int) -> None:
    other = SMOLLM2 | {"hidden_size": width, "model_type": "gemma3_text"}
    (Path(large) / "config.json").write_text(json.dumps(other))
    asked = made(large, engine={"lora": {"rank": 8}})
    assert resolved(asked, Path(large))[0].training.learning_rate == 7e-5


def test_a_large_model_has_the_cores_and_a_small_one_has_one(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))

    def threads(model: str, launcher: str = "local", **engine: Any) -> int:
        folder = TINY_MODEL if model == "tiny" else Path(model)
        config = made(model, engine={"threads": 0, **engine}, cluster={"launcher": launcher})
        return resolved(config, folder)[0].engine.threads

    assert (threads("tiny"), threads(large), threads(large, devices=2)) == (1, 6, 3)
    assert (threads(large, threads=2), threads(large, backend="tinker")) == (2, 1)
    assert threads(large, "ray") == 5, "the server has the sixth"
    assert threads(large, device="cuda") == 4


@pytest.mark.parametrize(("context", "tokens"), [(8192, 512), (600, 300)])
def test_a_reply_has_room_to_end(large: str, context: int, tokens: int) -> None:
    (Path(large) / "config.json").write_text(json.dumps(SMOLLM2 | {"max_position_embeddings": context}))
    unset = {"sampling": {}}
    assert resolved(made(large, **unset), Path(large))[0].sampling.max_tokens == tokens
    assert resolved(made("tiny", **unset), TINY_MODEL)[0].sampling.max_tokens == 64
    assert resolved(made(large, sampling={"max_tokens": 9}), Path(large))[0].sampling.max_tokens == 9


def test_a_role_that_trains_has_a_rate_of_its_own(large: str) -> None:
    role = {"kind": "trained", "learning_rate": 1e-3}
    config = made(large, roles={"r": role}, training={"learning_rate": 1e-6})
    _, notes = resolved(config, Path(large))
    assert [note.split(":")[0] for note in notes] == ["roles.r.learning_rate"]


def test_the_size_of_a_model_follows_from_its_config() -> None:
    assert parameters_of(SMOLLM2) == pytest.approx(135e6, rel=0.15)
    assert parameters_of({"text_config": SMOLLM2}) == parameters_of(SMOLLM2)
    assert parameters_of({"hidden_size": 8}) == float("inf"), "not known: the lower rate"


def test_the_plan_says_the_rate_and_what_does_not_fit(large: str) -> None:
    lines = plan(made(large, sampling={"max_tokens": 100_000}))
    assert "  1e-06, for all weights" in lines
    assert any("100,000 do not fit the context of 8,192" in line for line in lines)
    assert not any("do not fit" in line for line in plan(made(large, sampling={"max_tokens": 4096})))


@pytest.mark.parametrize(
    ("key", "setting"), [("clip_low", "clip_low_threshold"), ("clip_high", "clip_high_threshold")]
)
def test_a_clip_that_the_loss_does_not_use_is_refused(key: str, setting: str) -> None:
    config = TrainingConfig.model_validate({"loss_fn": "importance_sampling", key: 0.3})
    refusal = rf"training\.{key}: the loss 'importance_sampling' clips no ratios.*{setting}"
    with pytest.raises(ConfigError, match=refusal):
        loss_config(config, Loss(lambda logprobs, inputs, settings: -logprobs))
    clips = Loss(lambda logprobs, inputs, settings: -logprobs, settings={setting: 1.0})
    assert loss_config(config, clips)[setting] == pytest.approx(0.7 if key == "clip_low" else 1.3)
