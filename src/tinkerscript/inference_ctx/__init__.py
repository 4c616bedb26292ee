"""`InferenceContext`: from prompts and OpenAI choices to rollouts, with nothing guessed."""

from tinkerscript.inference_ctx.context import (
    SHORT_RESPONSE,
    InferenceChoice,
    InferenceContext,
    InferenceResponse,
    InferenceTurn,
    Reward,
)

__all__ = [
    "SHORT_RESPONSE",
    "InferenceChoice",
    "InferenceContext",
    "InferenceResponse",
    "InferenceTurn",
    "Reward",
]
