"""LangChain's two classes for OpenAI's routes return what OpenAI's own client returns."""

import asyncio
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

from server import Server

PROMPT = "The quick brown fox"
QUESTION = "Hi"
SETTINGS = {"model": "tiny", "temperature": 0, "max_tokens": 24}


def completions(server: Server, **changes: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, **SETTINGS | changes)


def chat(server: Server, **changes: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, **SETTINGS | changes)


def expected_text(server: Server, **changes: Any) -> str:
    """The text that OpenAI's own client gets."""
    body: Any = {**SETTINGS, "prompt": PROMPT, **changes}
    return str(server.client().completions.create(**body).choices[0].text)


def test_completions_whole_streamed_and_async_equal_openais_clients(server: Server) -> None:
    async def whole_and_streamed() -> tuple[str, str]:
        client = completions(server)
        return await client.ainvoke(PROMPT), "".join([piece async for piece in client.astream(PROMPT)])

    text = expected_text(server)
    assert completions(server).invoke(PROMPT) == text
    assert asyncio.run(whole_and_streamed()) == (text, text)
    assert completions(server).invoke(PROMPT, stop=[text[8:11]]) == text[: text.index(text[8:11])]
    long: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}  # takes several time slices
    pieces = list(completions(server, **long).stream(PROMPT))
    assert len(pieces) > 1
    assert "".join(pieces) == expected_text(server, **long)


def test_answers_have_a_logprob_for_every_token(server: Server) -> None:
    [[sequence]] = completions(server, logprobs=2).generate([PROMPT]).sequences
    logprobs = sequence.generation_info["logprobs"]
    assert "".join(logprobs["tokens"]) == sequence.text
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(alternatives) == 2 for alternatives in logprobs["top_logprobs"])
    answer = chat(server, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)


def test_chats_whole_streamed_and_async_equal_openais_clients(server: Server) -> None:
    async def whole_and_streamed() -> tuple[Any, str]:
        client = chat(server)
        answer = await client.ainvoke(QUESTION)
        return answer.content, "".join([str(chunk.content) async for chunk in client.astream(QUESTION)])

    body: Any = {**SETTINGS, "messages": [{"role": "user", "content": QUESTION}]}
    text = server.client().chat.completions.create(**body).choices[0].message.content
    answer = chat(server).invoke(QUESTION)
    usage = answer.usage_metadata
    assert answer.content == text
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert asyncio.run(whole_and_streamed()) == (text, text)
    chunks = list(chat(server, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
