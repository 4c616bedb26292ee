from __future__ import annotations

from pathlib import Path

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import COVARIANT, OPTIONAL_INPUTS, START, TERMS, Loss, resolve_loss
from tinkerscript.errors import ConfigError, EngineRequestError
from tinkerscript.model_folder import reads_images

# Provided by `to_training_datum`.
DATUM_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})


def policy_loss(config: TrainingConfig) -> Loss:
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
            f"training.loss_fn: {config.loss_fn!r} takes {COVARIANT} but declares no setting cov_share, "
            "which says how many tokens to mark: add it to the settings of the Loss"
        )
    if unknown := config.loss_config.keys() - loss.known.keys():
        own = ", ".join(sorted(loss.settings))
        raise ConfigError(
            f"training.loss_config: {config.loss_fn!r} has no setting {', '.join(sorted(unknown))}; it has "
            f"{own or 'none of its own (wrap your function in a Loss to add some)'}, and as every loss "
            f"{', '.join(sorted(TERMS))}"
        )
    return loss


def check_images(config: RunConfig, model: Path) -> None:
    training = config.training
    may_come = config.no_images.keys() < {"", *config.trained_roles} and reads_images(model)
    if may_come and START in policy_loss(training).inputs:
        raise ConfigError(
            f"training.loss_fn: {training.loss_fn!r} takes {START}, which sequences with images do not have, "
            f"and programs may send images to {model}; use a loss without it, or a model of text"
        )


# `dro` has no mask, so prompts would train; `stable_reinforce` has no published formula.
SERVICE_LOSSES = frozenset({"ppo", "importance_sampling", "cispo", "gspo"})


def check_loss(config: RunConfig) -> None:
    training = config.training
    loss = policy_loss(training)
    if training.kl_reference_every and not (
        training.kl_penalty_coef or training.kl_losses or START in loss.inputs
    ):
        raise ConfigError(
            "training.kl_reference_every renews the reference of a divergence, and the run has none: set "
            "kl_penalty_coef or loss_config.kl_k3, or leave it out"
        )
    if config.engine.backend == "tinker" and training.loss_fn not in SERVICE_LOSSES:
        raise ConfigError(
            f"training.loss_fn: {training.loss_fn!r} needs the embedded engine; a service behind Tinker's "
            f"protocol trains a run with {', '.join(sorted(SERVICE_LOSSES))}"
        )
    needs_engine = {
        **{f"loss_config.{name}": training.loss_config.get(name) for name in TERMS},
        "rollout_correction.off_policy_mask": training.rollout_correction.off_policy_mask,
        "top_entropy": training.top_entropy < 1,
        "adaptive_entropy": training.adaptive_entropy.target,
    }
    if config.engine.backend == "tinker" and (
        named := [name for name, is_on in needs_engine.items() if is_on]
    ):
        raise ConfigError(
            f"training.{named[0]} needs the embedded engine; leave it out, because the losses of a service "
            "behind Tinker's protocol have no such input"
        )
    if training.loss_fn == "gspo" and training.loss_mean != "sequences":
        raise ConfigError(
            f"training.loss_mean: {training.loss_mean} divides by tokens, as gspo does itself; use sequences"
        )


# Ratios of whole sequences are so close to 1 that a wider clip never acts.
WIDE_CLIP = 0.05


def wide_clip(config: TrainingConfig) -> str:
    given = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    wide = [f"{name}: {value:g}" for name, value in given.items() if value is not None and value > WIDE_CLIP]
    if config.loss_fn != "gspo" or not wide:
        return ""
    return (
        f"training.{', '.join(wide)} hardly ever clips the ratio of a whole sequence, which is a mean; leave "
        "it out to use 3e-4 and 4e-4, as in the gspo paper"
    )


def loss_config(config: TrainingConfig, loss: Loss) -> dict[str, float]:
    """Raises ConfigError for a clip of a loss that clips nothing."""
    given: dict[str, float] = {}
    for key, value, sign in (("clip_low", config.clip_low, -1), ("clip_high", config.clip_high, 1)):
        setting = f"{key}_threshold"
        if value is not None and setting not in loss.settings:
            raise ConfigError(
                f"training.{key}: the loss {config.loss_fn!r} clips no ratios; leave it out, or let your own "
                f"loss declare the setting {setting!r} (docs/extending.md)"
            )
        if value is not None:
            given[setting] = 1 + sign * value
    limit = config.rollout_correction.off_policy_mask
    terms = {"off_policy_mask": limit} if limit else {}
    return {**loss.settings, **given, **terms, **config.loss_config}
