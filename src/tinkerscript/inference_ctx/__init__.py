"""`InferenceContext`: prompts and replies of OpenAI-compatible servers -> rollouts, without guessing."""

from tinkerscript.inference_ctx.choices import ChoiceTokens, IdsSource
from tinkerscript.inference_ctx.inference_context import (
    SHORT_RESPONSE,
    InferenceChoice,
    InferenceContext,
    InferenceResponse,
    InferenceTurn,
    PromptFormat,
    PromptLike,
    RequestParameters,
    Reward,
    Tools,
)

__all__ = [
    "SHORT_RESPONSE",
    "ChoiceTokens",
    "IdsSource",
    "InferenceChoice",
    "InferenceContext",
    "InferenceResponse",
    "InferenceTurn",
    "PromptFormat",
    "PromptLike",
    "RequestParameters",
    "Reward",
    "Tools",
]
