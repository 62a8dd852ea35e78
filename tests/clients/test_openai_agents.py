"""OpenAI's agents with both protocols run a tool and answer with its result."""

import asyncio

import pytest
from agents import Agent, Model, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

from store import COUNT, MODEL, QUESTION, RULES, count_items
from wire import Wire


def model_of(wire: Wire, protocol: str) -> Model:
    client = AsyncOpenAI(base_url=f"{wire.url}/v1", api_key=wire.key, max_retries=0)
    if protocol == "chat":
        return OpenAIChatCompletionsModel(MODEL, client)
    return OpenAIResponsesModel(MODEL, client)


def agent(wire: Wire, protocol: str) -> Agent[None]:
    """An agent that has to call its tool first."""
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=200)
    tools = [function_tool(count_items)]
    return Agent("store", instructions=RULES, tools=tools, model=model_of(wire, protocol), model_settings=settings)


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_an_agent_runs_its_tool_whole_and_streamed(wire: Wire, protocol: str) -> None:
    outcome = asyncio.run(Runner.run(agent(wire, protocol), QUESTION))
    assert COUNT in outcome.final_output
    assert "tool_call_output_item" in [item.type for item in outcome.new_items]

    async def streamed() -> tuple[str, list[str]]:
        run = Runner.run_streamed(agent(wire, protocol), QUESTION)
        names = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        return run.final_output, names

    text, names = asyncio.run(streamed())
    assert COUNT in text
    assert {"tool_called", "tool_output", "message_output_created"} <= set(names)
