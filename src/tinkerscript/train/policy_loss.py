"""The policy-gradient loss of a run: which it is, its settings, and whether what trains can train with it."""

from __future__ import annotations

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import COVARIANT, OPTIONAL_INPUTS, TERMS, Loss, resolve_loss
from tinkerscript.errors import ConfigError, EngineRequestError

DATUM_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
"""What `to_training_datum` gives a loss."""


def policy_loss(config: TrainingConfig) -> Loss:
    """The loss that `loss_fn` names. Raises ConfigError if it is unknown or is not a policy-gradient loss."""
    try:
        loss = resolve_loss(config.loss_fn)
    except EngineRequestError as error:
        raise ConfigError(f"training.loss_fn: {error}") from error
    if loss.inputs - OPTIONAL_INPUTS != DATUM_INPUTS:
        raise ConfigError(
            f"training.loss_fn: {config.loss_fn!r} takes {', '.join(sorted(loss.inputs))}; a policy-gradient "
            f"loss, such as ppo, takes {', '.join(sorted(DATUM_INPUTS))}"
        )
    if COVARIANT in loss.inputs and "cov_share" not in loss.settings:
        raise ConfigError(
            f"training.loss_fn: {config.loss_fn!r} takes {COVARIANT} and declares no setting cov_share, "
            "which says how many tokens that marks: add it to the settings of the Loss"
        )
    if unknown := config.loss_config.keys() - loss.known.keys():
        own = ", ".join(sorted(loss.settings))
        raise ConfigError(
            f"training.loss_config: {config.loss_fn!r} has no setting {', '.join(sorted(unknown))}; it has "
            f"{own or 'none of its own (a function of your own needs a Loss around it)'}, and as every loss "
            f"{', '.join(sorted(TERMS))}"
        )
    return loss


SERVICE_LOSSES = frozenset({"ppo", "importance_sampling", "cispo", "gspo"})
"""Those that mean the same at a service. Its `dro` has no mask, so that prompts would train, and of its
`stable_reinforce` no formula is published."""


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError if the run's backend cannot train with `training.loss_fn`."""
    training = config.training
    policy_loss(training)
    if config.engine.backend == "tinker" and training.loss_fn not in SERVICE_LOSSES:
        raise ConfigError(
            f"training.loss_fn: {training.loss_fn!r} needs the embedded engine; a service behind Tinker's "
            f"protocol trains a run with {', '.join(sorted(SERVICE_LOSSES))}"
        )
    needs_engine = {
        **{f"loss_config.{name}": training.loss_config.get(name) for name in TERMS},
        "rollout_correction.off_policy_mask": training.rollout_correction.off_policy_mask,
        "top_entropy": training.top_entropy < 1,
    }
    if config.engine.backend == "tinker" and (
        named := [name for name, is_on in needs_engine.items() if is_on]
    ):
        raise ConfigError(
            f"training.{named[0]} needs the embedded engine; a service behind Tinker's protocol has no such "
            "input of its losses: leave it out"
        )
    if training.loss_fn == "gspo" and training.loss_mean != "sequences":
        raise ConfigError(
            f"training.loss_mean: {training.loss_mean} divides by tokens, as gspo does itself; use sequences"
        )


WIDE_CLIP = 0.05
"""Ratios of whole sequences stay so close to 1 that a clip this wide never acts."""


def wide_clip(config: TrainingConfig) -> str:
    """What to tell of `clip_low` and `clip_high` with gspo; empty: nothing."""
    given = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    wide = [f"{name}: {value:g}" for name, value in given.items() if value is not None and value > WIDE_CLIP]
    if config.loss_fn != "gspo" or not wide:
        return ""
    return (
        f"training.{', '.join(wide)} hardly ever clips the ratio of a whole sequence, which is a mean; leave "
        "it out for the 3e-4 and 4e-4 of gspo's authors"
    )


def loss_config(config: TrainingConfig, loss: Loss) -> dict[str, float]:
    """`loss_fn_config`: the loss's own settings, under those of the config."""
    clip = {
        "clip_low_threshold": None if config.clip_low is None else 1 - config.clip_low,
        "clip_high_threshold": None if config.clip_high is None else 1 + config.clip_high,
    }
    given = {key: value for key, value in clip.items() if key in loss.settings and value is not None}
    limit = config.rollout_correction.off_policy_mask
    terms = {"off_policy_mask": limit} if limit else {}
    return {**loss.settings, **given, **terms, **config.loss_config}
