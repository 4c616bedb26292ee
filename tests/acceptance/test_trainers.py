"""What converters make, given to the trainers themselves. Each part needs its package, and skips without it.

None of them is installed by `make test`: they pull other versions of torch. To run, install them beside it
without their dependencies (`pip install --no-deps --target FOLDER trl==1.16.0 accelerate verl==0.9.1 ...`),
and put FOLDER on PYTHONPATH. Tried with TRL 1.16.0, verl 0.9.1, SkyRL 0.3.0 and AReaL 1.0.4.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typing_extensions

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.rollouts.advantages import RolloutBatch, RolloutGroup
from tinkerscript.rollouts.trainers import to_areal, to_skyrl, to_trl, to_verl

pytestmark = pytest.mark.filterwarnings("ignore")


def groups() -> list[RolloutGroup]:
    """Two groups of three episodes of two turns; some of the tokens are constrained."""
    made: list[RolloutGroup] = []
    for number in range(2):
        episodes = []
        for index, reward in enumerate((1.0, 0.0, 0.25)):
            first = make_call(None, [5, 6, 7 + number], [9 + index, 10, 11], constrained=bytes([0, 2, 0]))
            second = make_call(first, [12], [13, 14 + index])
            episodes.append(make_episode([first, second], reward, f"e{number}.{index}"))
        made.append(make_group(episodes, f"g{number}"))
    return made


def masks() -> list[list[int]]:
    return [e.rollouts[0].response_loss_mask.astype(int).tolist() for g in groups() for e in g.episodes]


def expected() -> np.ndarray:
    """[6]: reward minus the group's mean."""
    return np.concatenate([group.advantages() for group in groups()])


def test_verl_computes_our_advantages() -> None:
    protocol = pytest.importorskip("verl.protocol")
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    proto = protocol.DataProto.from_single_dict(to_verl(RolloutBatch(tuple(groups()))))
    assert len(proto) == 6
    advantages, _ = algos.compute_grpo_outcome_advantage(
        token_level_rewards=proto.batch["rm_scores"],
        response_mask=proto.batch["response_mask"],
        index=proto.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=False,
    )
    np.testing.assert_allclose(advantages, expected()[:, None] * np.array(masks()), atol=1e-6)


def test_skyrl_takes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    # SkyRL is for Python 3.12, where pydantic takes `typing.TypedDict`.
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    utils = pytest.importorskip("skyrl.train.utils.trainer_utils")
    preprocess = pytest.importorskip("skyrl.train.dataset.preprocess")
    base = pytest.importorskip("skyrl.train.generators.base")
    output = to_skyrl(RolloutBatch(tuple(groups())), trajectory_id=base.TrajectoryID)
    assert output.keys() == base.GeneratorOutput.__annotations__.keys()
    utils.validate_generator_output(6, output)
    assert [each.to_string() for each in output["trajectory_ids"]] == [
        f"g{number}_{index}" for number in range(2) for index in range(3)
    ]

    class Tokenizer:
        pad_token_id = 0

    by_token = [
        [0.0] * (len(ids) - 1) + [r] for ids, r in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    sequences, _, _, rewards, loss_masks, logprobs, *_ = (
        preprocess.convert_prompts_responses_to_batch_tensors(
            Tokenizer(),
            output["prompt_token_ids"],
            output["response_ids"],
            by_token,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
    )
    assert sequences.shape == (6, 9)
    assert loss_masks.int().tolist() == masks()
    assert rewards.sum(-1).tolist() == [1.0, 0.0, 0.25] * 2
    np.testing.assert_allclose(logprobs, output["rollout_logprobs"], rtol=1e-6)


def test_areal_takes_the_trajectories() -> None:
    executor = pytest.importorskip("areal.infra.workflow_executor")
    data = pytest.importorskip("areal.utils.data")
    made = [to_areal(group) for group in groups()]
    for each in made:
        assert executor.check_trajectory_format(each, batch_size=3)
    batch = data.concat_padded_tensors(made)
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.25] * 2
    assert batch["loss_mask"][:, 3:].tolist() == masks()


def test_trl_trains_on_the_rollouts(tmp_path: Path, random_model: Path) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from trl import GRPOConfig

    made = groups()
    rolled = to_trl(made)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_words(), eos_token="w1", pad_token="w0"
    )
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        num_generations=3,
        per_device_train_batch_size=6,
        max_steps=1,
        scale_rewards="none",
        report_to=[],
        use_cpu=True,
        beta=0.0,
        save_strategy="no",
    )
    trainer = grpo.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(random_model),
        args=config,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"prompt": "w5"}, {"prompt": "w6"}]),
        reward_funcs=[lambda reward, **_: reward],
        rollout_func=lambda prompts, _: rolled,
    )
    inputs = [{"prompt": prompt} for prompt in ("w5", "w6") for _ in range(3)]
    scored = trainer._generate_and_score_completions(inputs)
    np.testing.assert_allclose(scored["advantages"], expected(), atol=1e-6)
    assert scored["tool_mask"].tolist() == masks()
    prompts = torch.tensor(rolled["prompt_ids"])
    assert scored["prompt_ids"].tolist() == prompts.tolist()
    assert scored["completion_ids"].tolist() == rolled["completion_ids"]
    trainer.train()


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made
