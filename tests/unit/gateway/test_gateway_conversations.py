"""Random conversations over a random, non-canonical sampler: what trains is exactly the sampler's log.

`CONVERSATIONS=2000` runs as many as `make chaos` does, `CONVERSATIONS_SEED` others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

from conversation_world import World
from conversations import FEATURES, Program
from tinkerscript.gateway.conversation import tree
from tinkerscript.rollouts.call import unpack_ids

TINY = Path(__file__).parents[3] / "src" / "tinkerscript" / "engine" / "tiny"
CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "150"))
SEED = int(os.environ.get("CONVERSATIONS_SEED", "1"))


async def test_rollouts_hold_the_sampled_tokens_once_each_under_their_own_prefixes() -> None:
    world = World(TINY, random.Random(SEED))
    features: Counter[str] = Counter()
    causes: Counter[str | None] = Counter()
    sampled = retokenised = 0
    for number in range(CONVERSATIONS):
        program = Program(world, random.Random(f"{SEED} {number}"))
        await program.run()
        features.update(program.features)
        causes += program.causes
        for each in program.sampler.log:
            ids = unpack_ids(each.sampled).tolist()
            tokenizer = world.renderer.tokenizer
            sampled += 1
            retokenised += tokenizer.encode(tokenizer.decode(ids)) != ids
        world.book.drop(program.key)
        for gateway in world.gateways:
            gateway.forget(program.key, 1)
    shares = {name: features[name] / CONVERSATIONS for name in FEATURES}
    print(f"{CONVERSATIONS} conversations, {sampled} samples, {retokenised / sampled:.0%} non-canonical")
    print({name: f"{share:.0%}" for name, share in shares.items()}, dict(causes))
    assert min(shares.values()) >= 0.15, shares
    assert retokenised / sampled > 0.5
    assert set(causes) <= {None, *tree.FORK_REASONS}
    assert causes[None] > sampled / 2
