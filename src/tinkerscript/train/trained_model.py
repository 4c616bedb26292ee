"""What the alignment check knows about the model that trains, read from its folder."""

from __future__ import annotations

from pathlib import Path

from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import IntArray
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.engines import Engine


def trained_model(folder: Path, engine: Engine) -> TrainedModel:
    """The vocabulary is the model's; stop tokens are the engine's and the tokenizer's."""
    tokenizer = LightTokenizer(folder)
    stops = set(engine.stop_ids)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)

    def retokenise(ids: IntArray) -> list[int]:
        return tokenizer.encode(tokenizer.decode(ids.tolist()), add_special_tokens=False)

    return TrainedModel(
        vocabulary=engine.vocabulary,
        stop_ids=stops,
        tokenizer=tokenizer.fingerprint,
        retokenise=retokenise,
    )
