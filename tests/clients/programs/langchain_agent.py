"""LangChain: `create_agent` over `ChatOpenAI`, by chat completions or by Responses."""

from __future__ import annotations

import os
from typing import Any

import travel
from features import conversations, serve
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from travel import FORCED, OBJECT, SHORT, SYSTEM, City

TOOLS = [tool(travel.get_weather), tool(travel.difference)]


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="policy", use_responses_api=os.environ["CLIENT_API"] == "responses", **options)


def agent(questions: tuple[str, ...], *, stream: bool) -> dict[str, Any]:
    graph = create_agent(model(), tools=TOOLS, system_prompt=SYSTEM)
    state: dict[str, Any] = {"messages": []}
    texts: list[str] = []
    for question in questions:
        asked = {"messages": [*state["messages"], {"role": "user", "content": question}]}
        if stream:
            for mode, part in graph.stream(asked, stream_mode=["messages", "values"]):
                state = part if mode == "values" else state
        else:
            state = graph.invoke(asked)
        texts.append(state["messages"][-1].text)
    return {"texts": texts}


def samples() -> Any:
    found = model(n=3).generate([[HumanMessage(SHORT)]]).generations[0]
    return {"texts": [generation.text for generation in found]}


def logprobs() -> Any:
    message = model(logprobs=True).invoke(SHORT)
    entries = message.response_metadata["logprobs"]["content"]
    return {"logprobs": [entry["logprob"] for entry in entries], "texts": [message.text]}


def required_tool() -> Any:
    message = model().bind_tools(TOOLS, tool_choice="any").invoke(FORCED)
    assert isinstance(message, AIMessage)
    return {"called": [call["name"] for call in message.tool_calls]}


def structured() -> Any:
    found = model().with_structured_output(City, method="json_schema").invoke(OBJECT)
    return {"texts": [found.model_dump_json()]}


if __name__ == "__main__":
    serve(*conversations(agent), samples, logprobs, required_tool, structured)
