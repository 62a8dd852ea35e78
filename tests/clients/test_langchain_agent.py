"""LangChain's agents and structured outputs, with the classes for chats, responses and messages."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from store import COUNT, MODEL, QUESTION, RULES, Stock, count_items
from wire import Wire

PROTOCOLS = ["chat", "responses", "messages"]
# It names the tool, since LangChain leaves the choice to the model.
TURN = {"messages": [("user", f"{QUESTION} Call count_items.")]}


def model(wire: Wire, protocol: str) -> BaseChatModel:
    options: Any = {"model": MODEL, "api_key": wire.key, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    if protocol == "messages":
        return ChatAnthropic(base_url=wire.url, **options)
    return ChatOpenAI(base_url=f"{wire.url}/v1", use_responses_api=protocol == "responses", **options)


def agent(wire: Wire, protocol: str) -> Any:
    return create_agent(model(wire, protocol), [count_items], system_prompt=RULES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_agent_runs_its_tool_whole_and_streamed(wire: Wire, protocol: str) -> None:
    messages = agent(wire, protocol).invoke(TURN)["messages"]
    assert "tool" in [message.type for message in messages]
    assert COUNT in messages[-1].text
    chunks = [chunk for chunk, _ in agent(wire, protocol).stream(TURN, stream_mode="messages")]
    assert "tool" in [chunk.type for chunk in chunks]
    assert COUNT in "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_output_has_its_structure_and_a_tool_can_be_required(wire: Wire, protocol: str) -> None:
    for method in ("function_calling", "json_schema"):
        answer = model(wire, protocol).with_structured_output(Stock, method=method).invoke(QUESTION)
        assert isinstance(answer, Stock), method
    bound = model(wire, protocol).bind_tools([count_items], tool_choice="any", parallel_tool_calls=False)
    [call] = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "count_items"
