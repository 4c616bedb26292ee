"""What converters make, given to the trainers themselves. Each part needs its package, and skips without it.

None of them is installed by `make test`: they pull other versions of torch. To run, install them beside it
without their dependencies (`pip install --no-deps --target FOLDER trl==1.16.0 accelerate verl==0.9.1 ...`),
and put FOLDER on PYTHONPATH. Tried with TRL 1.16.0 and verl 0.9.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.rollouts.advantages import RolloutBatch, RolloutGroup
from tinkerscript.rollouts.trainers import to_trl, to_verl

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
