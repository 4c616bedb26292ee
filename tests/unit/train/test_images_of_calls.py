"""Calls with images: equal ids after different images are different texts."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.errors import EngineError
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.alignment.checks import find_errors
from tinkerscript.rollouts.alignment.diagnosis import Contradictions
from tinkerscript.rollouts.call import Call, PlacedImage, conversation_of
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.parquet import read_parquet, write_parquet
from tinkerscript.testing import ScriptedSampler
from tinkerscript.train.policy import SeededSampler
from tinkerscript.train.token_advantages import scored

CAT, DOG = b"cat", b"dog"
IMAGE = 7
"""The placeholder: every image is two."""


def asked(parent: Call | None, data: bytes, sampled: list[int], **extra: Any) -> Call:
    return make_call(parent, [1, IMAGE, IMAGE, 2], sampled, images=[PlacedImage(1, data)], **extra)


def test_equal_ids_after_another_image_are_another_sequence() -> None:
    first = asked(None, CAT, [3, 4])
    # A root, as after a fork: its prompt is all of the first call's ids, and more.
    other = make_call(None, [1, IMAGE, IMAGE, 2, 3, 4, 5], [6], images=[PlacedImage(1, DOG)])
    plain = make_call(None, [1, IMAGE, IMAGE, 2, 3, 4, 5], [6])
    same = make_call(None, [1, IMAGE, IMAGE, 2, 3, 4, 5], [6], images=[PlacedImage(1, CAT)])
    for call in (other, plain):
        one, two = merge_calls([first, call], episode_uuid="e")
        assert [each.images for each in (one, two)] == [(PlacedImage(1, CAT),), tuple(call.images)]
        assert two.fork == 1  # Up to the image.
    (joined,) = merge_calls([first, same], episode_uuid="e")
    assert joined.images == (PlacedImage(1, CAT),)
    # After a shared parent, only the new images differ.
    branches = [first, asked(first, CAT, [8]), asked(first, DOG, [9])]
    one, two = merge_calls(branches, episode_uuid="e")
    assert two.fork == 7
    assert two.images == (PlacedImage(1, CAT), PlacedImage(7, DOG))


@pytest.mark.parametrize(
    "images", [(), (PlacedImage(1, DOG),), (PlacedImage(2, CAT),), (PlacedImage(1, CAT), PlacedImage(2, CAT))]
)
def test_a_sequence_with_other_images_than_its_calls_does_not_train(images: tuple[PlacedImage, ...]) -> None:
    (rollout,) = merge_calls([asked(None, CAT, [3, 4])], episode_uuid="e")
    assert find_errors(rollout, vocabulary=10) == []
    assert find_errors(replace(rollout, images=images), vocabulary=10) == ["images_differ_from_prompt"]


def test_replies_about_different_images_do_not_contradict_each_other() -> None:
    rollouts = [
        *make_episode([asked(None, CAT, [3], logprobs=[-0.1])]).rollouts,
        *make_episode([asked(None, DOG, [3], logprobs=[-2.0])]).rollouts,
    ]
    found = Contradictions()
    found.add(rollouts)
    assert found.repeats == 0
    found.add([rollouts[0], *make_episode([asked(None, CAT, [3], logprobs=[-2.0])]).rollouts])
    assert found.repeats == 1


def test_each_image_has_its_own_seeds() -> None:
    """So that which of two images was asked about first does not change a run."""
    ids = np.array([1, IMAGE], np.int32)
    seeds = list[dict[bytes, int]]()
    for order in ((CAT, DOG), (DOG, CAT)):
        sampler = SeededSampler(ScriptedSampler(lambda _: [1]), seed=1, step=0, max_context=8)
        seeds.append({data: sampler.seed_for(ids, [PlacedImage(1, data)]) for data in order})
    assert seeds[0] == seeds[1]
    assert seeds[0][CAT] != seeds[0][DOG]


def test_a_table_holds_the_images(tmp_path: Path) -> None:
    first = asked(None, CAT, [3, 4])
    episode = make_episode([first, asked(first, DOG, [5]), asked(None, DOG, [6])])
    write_parquet(tmp_path / "table", [make_group([episode])])
    (group,) = read_parquet(tmp_path / "table")
    (read,) = group.episodes
    assert [each.images for each in read.rollouts] == [
        (PlacedImage(1, CAT), PlacedImage(7, DOG)),
        (PlacedImage(1, DOG),),
    ]
    assert read.calls == episode.calls


def test_judges_read_the_images_of_a_conversation() -> None:
    """As `image_url` parts, in OpenAI's format."""
    image = {"sha256": "", "width": 1, "height": 1}
    said = [
        {"role": "user", "content": "What are and ?", "images": [{**image, "at": 9}, {**image, "at": 13}]},
        {"role": "user", "content": "", "images": [{**image, "at": 0}]},
    ]
    files = [b"\x89PNG\r\n", b"\xff\xd8\xff", b"RIFF....WEBP"]
    placed = [PlacedImage(number, file) for number, file in enumerate(files)]
    call = make_call(None, [7, 7, 7], [3], images=placed, messages=json.dumps(said))

    def part(kind: str, file: bytes) -> dict[str, Any]:
        url = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    kinds = [part(*each) for each in zip(("png", "jpeg", "webp"), files, strict=True)]
    first, second = conversation_of([call])
    texts = [{"type": "text", "text": text} for text in ("What are ", "and ", "?")]
    assert first["content"] == [texts[0], kinds[0], texts[1], kinds[1], texts[2]]
    assert second == {"role": "user", "content": [kinds[2]]}


async def test_sequences_with_images_are_not_scored_by_another_model() -> None:
    (rollout,) = merge_calls([asked(None, CAT, [3, 4])], episode_uuid="e")

    async def reference(*_: object) -> list[Any]:
        raise AssertionError("asked")

    with pytest.raises(EngineError, match="without kl_penalty_coef"):
        await scored(reference, [WeightedRollout(rollout, np.zeros(6, np.float32))])
