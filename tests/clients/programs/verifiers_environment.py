"""`verifiers`: a `ToolEnv` whose user asks on; its own records of tokens come from the replies."""

from __future__ import annotations

import os
from typing import Any

import travel
import verifiers as vf
from datasets import Dataset
from features import serve
from travel import AGAIN, BROKEN, CONVERSATION, SHORT, SYSTEM
from verifiers.types import ClientConfig


class Travel(vf.ToolEnv):
    """Tools, and a user with further questions."""

    def __init__(self, questions: tuple[str, ...]) -> None:
        self._questions = questions
        super().__init__(
            tools=[travel.get_weather, travel.difference],
            dataset=Dataset.from_list([{"question": questions[0], "answer": ""}]),
            system_prompt=SYSTEM,
            rubric=vf.Rubric(funcs=[self.reward]),
            max_turns=20,
        )

    async def reward(self, completion: Any) -> float:
        return 1.0 if completion else 0.0

    @vf.stop
    async def no_tools_called(self, state: vf.State) -> bool:
        """The last question is answered."""
        return len(answers(state)) == len(self._questions)

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> Any:
        if messages[-1].tool_calls:
            return await super().env_response(messages, state, **kwargs)
        return [{"role": "user", "content": self._questions[len(answers(state))]}]


def answers(state: vf.State) -> list[str]:
    """What was said to the user so far."""
    last = [step["completion"][-1] for step in state["trajectory"]]
    return [message.content for message in last if not message.tool_calls]


def agent(questions: tuple[str, ...], **sampling: Any) -> dict[str, Any]:
    environment = Travel(questions)
    client = ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", connect_timeout=30
    )
    results = environment.generate_sync(
        environment.get_dataset(),
        client,
        model="policy",
        sampling_args=sampling,
        state_columns=["trajectory"],
        on_progress=[],
    )
    output = results["outputs"][0]
    if output.get("error"):
        raise RuntimeError(str(output["error"]))
    steps = [
        {
            "prompt_ids": list(step["tokens"]["prompt_ids"]),
            "ids": list(step["tokens"]["completion_ids"]),
            "logprobs": list(step["tokens"]["completion_logprobs"]),
        }
        for step in output["trajectory"]
        if step["tokens"]
    ]
    return {"texts": answers(output)} | ({"steps": steps} if steps else {})


def conversation() -> Any:
    return agent(CONVERSATION)


def logprobs() -> Any:
    """What a trainer needs: verifiers keeps ids and log probabilities of every step."""
    return agent(CONVERSATION, logprobs=True, extra_body={"return_token_ids": True})


def broken_call() -> Any:
    return agent((BROKEN, AGAIN))


def retry() -> Any:
    return agent((SHORT,))


if __name__ == "__main__":
    serve(conversation, logprobs, broken_call, retry)
