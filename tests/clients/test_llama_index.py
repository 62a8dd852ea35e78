"""LlamaIndex's `OpenAILike`: completions, agents and structured outputs."""

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from server import Server
from store import COUNT, MODEL, QUESTION, RULES, Stock, count_items
from wire import Wire


def test_a_completion_whole_and_streamed_equals_openais_clients(server: Server) -> None:
    prompt, settings = "The quick brown fox", {"model": "tiny", "temperature": 0, "max_tokens": 24}
    body: Any = {**settings, "prompt": prompt}
    text = server.client().completions.create(**body).choices[0].text
    llm = OpenAILike(api_base=f"{server.url}/v1", api_key=server.key, max_retries=0, **settings)
    assert llm.complete(prompt).text == text
    assert "".join(piece.delta for piece in llm.stream_complete(prompt)) == text


def model(wire: Wire) -> OpenAILike:
    options: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    options |= {"max_tokens": 200, "temperature": 0}
    return OpenAILike(model=MODEL, api_base=f"{wire.url}/v1", api_key=wire.key, **options)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_an_agent_runs_its_tool(wire: Wire, streaming: bool) -> None:
    async def run() -> Any:
        options: Any = {"system_prompt": RULES, "streaming": streaming, "initial_tool_choice": "count_items"}
        return await FunctionAgent(tools=[count_items], llm=model(wire), **options).run(QUESTION)

    outcome = asyncio.run(run())
    assert [call.tool_name for call in outcome.tool_calls] == ["count_items"]
    assert COUNT in str(outcome)


def test_an_output_has_its_structure(wire: Wire) -> None:
    assert isinstance(model(wire).as_structured_llm(Stock).complete(QUESTION).raw, Stock)
