"""Distillation from a teacher: numbers worked out by hand, and what trains."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker
import torch

from rollout_helpers import make_accepted, make_call, make_episode, make_group, update
from small_models import sft_datum
from tinkerscript.config import DistillationConfig, RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.testing import QuietReporter, ScriptedSampler
from tinkerscript.train.backends.backend import FrozenModel
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.learner import Learner
from tinkerscript.train.token_advantages import Distillation, KLPenalty, open_distillation
from tinkerscript.trainer_link.messages import EpisodeFailed, usable
from trainer_fakes import LENIENT, NotingClient, made_learner

TEACHER = {11: -0.5, 12: -3.0, 13: -1.0}


class ScriptedTeacher(FrozenModel):
    """Gives tokens the log probabilities of `TEACHER`; others have -2."""

    def __init__(self) -> None:
        self.sampler = ScriptedSampler(lambda _: [1])
        self.max_context = 48
        self.folder = Path()
        self.asked: list[list[int]] = []

    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        self.asked += [ids.tolist() for ids in sequences]
        return [np.array([TEACHER.get(int(i), -2.0) for i in ids], np.float32) for ids in sequences]


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(TINY_MODEL)


def one_turn(reward: float, name: str = "e", **more: Any) -> Any:
    """Prompt 5 6; sampled 11, 12, 13 with log probabilities -1, -1, -2."""
    call = make_call(None, [5, 6], [11, 12, 13], logprobs=[-1.0, -1.0, -2.0], **more)
    return make_episode([call], reward, name)


def items(*episodes: Any) -> Any:
    return list(make_group(list(episodes)).weighted())


def distillation(model: FrozenModel | None = None, **more: Any) -> Distillation:
    config = DistillationConfig.model_validate({"teacher": "t", **more})
    return Distillation(model or ScriptedTeacher(), config, renderer=renderer)


async def test_only_tokens_with_loss_are_charged_and_counted() -> None:
    """What a grammar forced has no divergence, nor has the prompt of the second turn."""
    first = make_call(None, [5, 6], [11, 12], logprobs=[-1.0, -1.0], constrained=bytes([0, 2]))
    second = make_call(first, [7], [13], logprobs=[-2.0])
    teacher = ScriptedTeacher()
    (item,), mean = await distillation(teacher).apply(items(make_episode([first, second])))
    np.testing.assert_allclose(item.advantages, [0, 0, 0.5, 0, 0, 1.0], atol=1e-6)
    assert mean == pytest.approx((-0.5 - 1) / 2)
    assert teacher.asked == [[5, 6, 11, 12, 7, 13]], "the whole sequence, once"


async def test_it_is_tinker_cookbooks_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty

    from tinkerscript.rollouts.trainers import to_datum

    batch = items(one_turn(1.0, "a"), one_turn(0.0, "b"))
    data = [to_datum(item) for item in batch]
    for datum, item in zip(data, batch, strict=True):
        mask = item.rollout.sampled[1:].astype(np.float32)
        datum.loss_fn_inputs["mask"] = tinker.TensorData.from_numpy(mask)

    class Client:
        async def compute_logprobs_async(self, prompt: tinker.ModelInput) -> list[float | None]:
            return [None, *(TEACHER.get(token, -2.0) for token in prompt.to_ints()[1:])]

    client: Any = Client()
    theirs = await incorporate_kl_penalty(data, [client, client], [0, 0], 1.0, 0)
    ours, mean = await distillation().apply(batch)
    assert mean == pytest.approx(theirs["teacher_kl"])
    for item, datum in zip(ours, data, strict=True):
        sampled = item.rollout.sampled[1:]
        expected = datum.loss_fn_inputs["advantages"].to_numpy()
        np.testing.assert_allclose(item.advantages[1:][sampled], expected[sampled], atol=1e-6)


# A teacher that knows more


def asked(text: str, *more: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[turn % 2], "content": said} for turn, said in enumerate((text, *more))
    ]


async def test_a_teacher_scores_the_same_tokens_after_a_prompt_that_knows_more() -> None:
    """Two turns of one episode, and a second sequence that forks from the first turn; another episode has no
    context."""
    teacher = ScriptedTeacher()
    prompt = renderer().render(asked("2+2?"), [])
    tail = [7, 7]
    first = make_call(
        None, prompt, [11, 12], messages=json.dumps(asked("2+2?")), reply=json.dumps(asked("", "no")[1])
    )
    second = make_call(
        first, tail, [13], messages=json.dumps(asked("sure?")), reply=json.dumps(asked("", "4")[1])
    )
    third = make_call(first, [8], [11], messages=json.dumps(asked("why?")))
    episode = replace(make_episode([first, second, third]), metadata={"teacher_context": "It is 4."})
    other = one_turn(0.0)
    batch = items(episode, other)
    found, _ = await distillation(teacher).apply(batch, [episode, other])
    told = renderer().render(asked("2+2?\n\nIt is 4."), [])
    later = renderer().render([*asked("2+2?", "no"), *asked("why?\n\nIt is 4.")], [])
    assert teacher.asked == [[*told, 11, 12, *tail, 13], [*later, 11], [5, 6, 11, 12, 13]]
    for item in found:
        mask = item.rollout.loss_mask
        expected = [TEACHER[int(token)] for token in item.rollout.tokens[mask]]
        base = next(each for each in batch if each.rollout is item.rollout).advantages
        gaps = item.rollout.logprobs[mask] - np.array(expected)
        np.testing.assert_allclose((item.advantages - base)[mask], -gaps, atol=1e-6)
        assert not item.advantages[~mask].any()


@pytest.mark.parametrize(
    ("context", "messages", "message"),
    [(3, asked("2+2?"), "it is 3"), ("It is 4.", [], "the prompt has none")],
)
async def test_a_context_that_the_teacher_cannot_read_is_named(
    context: Any, messages: Any, message: str
) -> None:
    call = make_call(None, [5, 6], [11], messages=json.dumps(messages))
    episode = replace(make_episode([call]), metadata={"teacher_context": context})
    with pytest.raises(EngineError, match=f"episode e: teacher_context in the metadata .*{message}"):
        await distillation().apply(items(episode), [episode])
    outcome = make_accepted("e", 1.0, [call], metadata={"teacher_context": context})
    with pytest.raises(ValueError, match=f"episode e: teacher_context in the metadata .*{message}"):
        distillation().check(outcome)


@pytest.mark.parametrize(("tokens", "words", "length"), [(46, 0, 48), (47, 0, 49), (2, 1, 18), (2, 40, 96)])
def test_an_episode_that_is_too_long_for_the_teacher_is_named(tokens: int, words: int, length: int) -> None:
    """It reads 48 tokens."""
    call = make_call(None, [5, 6], [11] * tokens, messages=json.dumps(asked("2+2?")))
    context = {"teacher_context": "4 " * words} if words else {}
    outcome = make_accepted("e", 1.0, [call], metadata=context)
    if words:
        prompt = renderer().render(asked("2+2?\n\n" + "4 " * words), [])
        assert len(prompt) + tokens == length
    if length > 48:
        with pytest.raises(ValueError, match=f"the teacher 't' reads 48 tokens, and a sequence has {length}"):
            distillation().check(outcome)
    else:
        distillation().check(outcome)


def test_a_sequence_that_is_too_long_for_the_teacher_is_the_last_that_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client could make thousands, each of which takes a second."""
    rendered: list[Any] = []
    render = ChatRenderer.render

    def counted(self: ChatRenderer, *args: Any) -> list[int]:
        rendered.append(args)
        return render(self, *args)

    monkeypatch.setattr(ChatRenderer, "render", counted)
    calls = [make_call(None, [5, 6, number], [11], messages=json.dumps(asked("2+2?"))) for number in range(9)]
    outcome = make_accepted("e", 1.0, calls, metadata={"teacher_context": "4 " * 40})
    with pytest.raises(ValueError, match="reads 48 tokens"):
        distillation().check(outcome)
    assert len(rendered) == 1


def test_an_episode_of_another_kind_is_not_read_by_the_teacher() -> None:
    outcome = make_accepted("e", 1.0, [make_call(None, [5, 6], [11])], metadata={"teacher_context": 3})
    assert isinstance(usable(outcome, check_for_teacher=distillation().check), EpisodeFailed)
    evaluated = msgspec.structs.replace(outcome, episode_type="eval")
    assert usable(evaluated, check_for_teacher=distillation().check) is evaluated


# What trains


def learner(
    engine: EmbeddedEngine, teacher: FrozenModel | None = None, **section: Any
) -> tuple[Learner, NotingClient]:
    client = NotingClient(engine.create_training_client())
    more: dict[str, Any] = {**LENIENT, "loss_fn": "importance_sampling", "grad_clip_norm": 0}
    section = {"teacher": "t", **section}
    made = distillation(teacher, **section)
    return made_learner(client, teacher=made, distillation=section, **more), client


def advantages(data: list[tinker.Datum]) -> list[list[float]]:
    return [[round(x, 5) for x in datum.loss_fn_inputs["advantages"].to_numpy().tolist()] for datum in data]


def pair(*rewards: float) -> RolloutGroup:
    return make_group([one_turn(reward, f"e{number}") for number, reward in enumerate(rewards)])


PURE = [0.0, 0.5, -2.0, 1.0]
"""By hand: d = log p - log p(teacher) is -1 + 0.5, -1 + 3, -2 + 1, and each token is charged its own."""


async def test_a_group_of_equal_rewards_trains_on_the_teacher(engine: EmbeddedEngine) -> None:
    made, client = learner(engine)
    metrics = await update(made, [pair(1.0, 1.0)], step=1)
    assert metrics["train/sequences"] == 2
    assert metrics["distillation/teacher_kl"] == pytest.approx(1 / 6)
    assert client.losses == [("importance_sampling", None)]
    assert advantages(client.trained) == [[x / 2 for x in PURE]] * 2, "each sequence has half of the step"
    assert len(made.replayable) == 1
    (shown, _) = made.advantages.values()
    np.testing.assert_allclose(shown[1:], PURE)


async def test_a_single_episode_is_a_group(engine: EmbeddedEngine) -> None:
    made, client = learner(engine)
    assert made.config.min_group == 1
    assert (await update(made, [pair(1.0)], step=1))["train/sequences"] == 1
    assert advantages(client.trained) == [PURE]


@pytest.mark.parametrize("weight", [0.0, 3.0])
async def test_rewards_have_the_part_that_their_weight_gives_them(
    engine: EmbeddedEngine, weight: float
) -> None:
    made, client = learner(engine, reward_coef=weight)
    await update(made, [pair(1.0, 0.0)], step=1)
    expected = [[0.0, *((x + weight * a) / 2 for x in PURE[1:])] for a in (0.5, -0.5)]
    assert sorted(advantages(client.trained)) == sorted(expected)


async def test_the_contexts_of_a_step_reach_the_teacher(engine: EmbeddedEngine) -> None:
    teacher = ScriptedTeacher()
    call = make_call(None, [5, 6], [11, 12], messages=json.dumps(asked("2+2?")))
    made, _ = learner(engine, teacher)
    made.take([("g", [make_accepted("a", 1.0, [call], metadata={"teacher_context": "It is 4."})])])
    await made.check(step=1)
    assert teacher.asked == [[*renderer().render(asked("2+2?\n\nIt is 4."), []), 11, 12]]


# The teacher


@pytest.fixture
async def backend(random_model: Path, tmp_path: Path) -> AsyncIterator[EmbeddedBackend]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, seed=3) as engine:
        yield EmbeddedBackend(engine)


def run_config(**role: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"roles": {"t": {"kind": "frozen", **role}}, "training": {"distillation": {"teacher": "t"}}}
    )


async def test_a_teachers_most_probable_tokens_are_a_loss(
    backend: EmbeddedBackend, random_model: Path
) -> None:
    """The policy has moved away from the teacher, which is the start: loss, gradient and divergences at the
    temperature of each token are plain torch's."""
    for _ in range(2):
        await backend.client.forward_backward([sft_datum([5, 9, 33, 2])], "cross_entropy")
        await backend.client.optim_step(tinker.AdamParams(learning_rate=0.02))
    policy = load_model(Path((await backend.client.save_state("moved")).path))
    ids = np.array([5, 6, 11, 12, 7, 13, 14], np.int64)
    temperatures = torch.tensor([1, 0.7, 0.7, 1, 1.3, 1.3])[:, None]

    def scaled(model: Any) -> torch.Tensor:
        return (model(torch.from_numpy(ids[None, :-1])).logits[0] / temperatures).log_softmax(-1)

    p, t = scaled(policy), scaled(load_model(random_model)).detach()
    top = t.topk(3).indices
    rests = [(1 - each.gather(-1, top).exp().sum(-1, keepdim=True)).log() for each in (p, t)]
    both = [each.gather(-1, top) for each in (p, t)]
    ours, theirs = (torch.cat(each, -1) for each in zip(both, rests, strict=True))
    expected = (ours.exp() * (ours - theirs)).sum(-1)[[1, 2, 4, 5]].mean()
    expected.backward()
    norm = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None]).norm()

    rows = p[torch.arange(6), torch.from_numpy(ids[1:])].tolist()
    first = make_call(None, [5, 6], [11, 12], logprobs=rows[1:3], temperature=0.7)
    second = make_call(first, [7], [13, 14], logprobs=rows[4:], temperature=1.3)
    group = make_group([make_episode([first, second], 1.0)])
    taught = {"teacher": "t", "top_k": 3}
    config = RunConfig.model_validate(
        {"roles": {"t": {"kind": "frozen"}}, "training": {"distillation": taught}}
    )
    async with open_distillation(config, backend, folder=random_model, progress=QuietReporter()) as made:
        more: dict[str, Any] = {"loss_mean": "tokens", "group_size": 1, "grad_clip_norm": 0}
        learner = made_learner(backend.client, teacher=made, distillation=taught, learning_rate=1e-12, **more)
        metrics = await update(learner, [group], step=1)
    assert metrics["train/loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    sampled = (p - t)[torch.arange(6), torch.from_numpy(ids[1:])][[1, 2, 4, 5]].mean()
    divergences = [
        metrics["distillation/teacher_kl"],
        (await distillation(await backend.open_frozen("")).apply(list(group.weighted())))[1],
        (await KLPenalty(backend.start_logprobs, coef=1.0).apply(list(group.weighted())))[1],
    ]
    assert divergences == pytest.approx([float(sampled.detach())] * 3, abs=1e-5)


async def test_a_teacher_with_other_tokens_is_refused_before_the_first_episode(
    backend: EmbeddedBackend, random_model: Path
) -> None:
    config = run_config(model="tiny")
    with pytest.raises(ConfigError, match=r"teacher: 't' has another tokenizer .*: id \d+ is .* here, and "):
        async with open_distillation(config, backend, folder=random_model, progress=QuietReporter()):
            pass


TAUGHT = {"distillation": {"teacher": "t"}}
OUTSIDE = {"kind": "outside", "base_url": "http://h", "model": "m"}
FROZEN = {"kind": "frozen"}


@pytest.mark.parametrize(
    ("roles", "training", "reason"),
    [
        ({}, TAUGHT, "'t' is not one of the roles .* which are none"),
        ({"t": OUTSIDE, "u": FROZEN}, TAUGHT, "'t' is not one of the roles of kind: frozen, which are u"),
        ({}, {"group_size": 1}, "group_size: 1 leaves nothing to compare"),
        (
            {},
            {"group_size": 1, "distillation": {"teacher": "t", "reward_coef": 1}},
            "group_size: 1 leaves nothing to compare",
        ),
        ({}, {"batch_rule": "differing_groups", **TAUGHT}, "differing_groups would replace groups"),
        (
            {"t": {**FROZEN, "base_url": "http://h"}},
            {"distillation": {"teacher": "t", "top_k": 3}},
            "top_k: 3 needs a teacher in the trainer",
        ),
    ],
)
def test_what_could_not_train_is_refused(
    roles: dict[str, Any], training: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate({"roles": roles, "training": training})
