"""Find the routers of a mixture, and prove that their choices can be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tinkerscript.engine.decoder import FORWARD_ERRORS, OwnLogits, distance, own_logits
from tinkerscript.engine.routing import TOPK, Routing, experts_of
from tinkerscript.errors import EngineError


def routing_of(model: PreTrainedModel, own: OwnLogits | None = None) -> Routing:
    """Return how the routers choose, if a replay gives the same logits and other choices do not."""
    kind = model.config.model_type
    if not (experts := experts_of(model.config)):
        raise EngineError(
            f"engine.routing_replay: a model of type {kind!r} has no experts to choose from; leave it out"
        )
    own = own or own_logits(model)
    calls = _topk_calls(model, own.ids)
    routers = {path: found for path, found in calls.items() if found[-1][0] == experts}
    shapes = {(len(found) - 1, found[-1][1]) for found in routers.values()}
    if len(shapes) != 1 or next(iter(shapes))[1] >= experts:
        raise EngineError(
            f"engine.routing_replay: the routers of model type {kind!r} do not choose among their {experts} "
            "experts with one call of topk, so their choices cannot be replayed; leave it out"
        )
    ((number, chosen),) = shapes
    routing = Routing(tuple(routers), number, experts, chosen)
    same, others = _replayed_gaps(routing, model, own)
    if same > own.limit or others <= same:
        raise EngineError(
            f"engine.routing_replay: model type {kind!r} does not replay its routers' choices: the same ones "
            f"change log probabilities by {same:.2g} nats and others by {others:.2g}, where rounding changes "
            f"{own.limit:.2g}; leave it out"
        )
    return routing


@torch.no_grad()
def _replayed_gaps(routing: Routing, model: PreTrainedModel, own: OwnLogits) -> tuple[float, float]:
    """Differences of logits with the recorded choices and with others, in nats."""
    with routing.recorded(model) as choices:
        logits: Tensor = model(input_ids=own.ids, use_cache=False).logits
    ids = torch.stack(choices, 1)
    found: list[float] = []
    for replayed in (ids, (ids + 1) % routing.experts):
        with routing.replayed(model, replayed):
            again: Tensor = model(input_ids=own.ids, use_cache=False).logits
        found.append(distance(logits, again))
    return found[0], found[1]


@torch.no_grad()
def _topk_calls(model: PreTrainedModel, ids: Tensor) -> Mapping[str, list[tuple[int, int]]]:
    """Map the path of each module that calls `topk` to each call's (number of scores, k)."""
    paths = {module: path for path, module in model.named_modules()}
    running: list[nn.Module] = []
    found: dict[str, list[tuple[int, int]]] = {}

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in TOPK:
                call = args[0].shape[-1], result.indices.shape[-1]
                found.setdefault(paths[running[-1]], []).append(call)
            return result

    def enter(module: nn.Module, _inputs: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(enter).remove)
        undo.callback(register_module_forward_hook(leave).remove)
        undo.enter_context(Listening())
        try:
            model(input_ids=ids, use_cache=False)
        except FORWARD_ERRORS as error:
            raise EngineError(
                f"engine.routing_replay: model type {model.config.model_type!r} gives no logits for a text: "
                f"{type(error).__name__}: {error}"
            ) from error
    return found
