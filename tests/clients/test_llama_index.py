"""LlamaIndex's class for OpenAI-like servers returns what OpenAI's own client returns."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from server import Server

PROMPT = "The quick brown fox"
SETTINGS = {"model": "tiny", "temperature": 0, "max_tokens": 24}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


class Weather(BaseModel):
    """An answer with a form."""

    city: Literal["Paris", "Lunt"]
    sunny: bool


def client(server: Server, **changes: Any) -> OpenAILike:
    """LlamaIndex's class for both routes."""
    return OpenAILike(api_base=f"{server.url}/v1", api_key=server.key, max_retries=0, **SETTINGS | changes)


def expected_text(server: Server) -> str:
    """The text that OpenAI's own client gets."""
    body: Any = {**SETTINGS, "prompt": PROMPT}
    return str(server.client().completions.create(**body).choices[0].text)


def expected_answer(server: Server) -> str:
    """The message that OpenAI's own client gets."""
    body: Any = {**SETTINGS, "messages": MESSAGES}
    return str(server.client().chat.completions.create(**body).choices[0].message.content)


def messages() -> list[ChatMessage]:
    """The messages in LlamaIndex's type."""
    return [ChatMessage(**message) for message in MESSAGES]


def test_a_completion_has_the_speculation_statistics(server: Server) -> None:
    answer = client(server).complete(PROMPT)
    assert answer.text == expected_text(server)
    assert answer.raw.speculation["drafted_tokens"] > 0


def test_a_streamed_completion_equals_openais_clients(server: Server) -> None:
    pieces = list(client(server).stream_complete(PROMPT))
    assert "".join(piece.delta for piece in pieces) == expected_text(server)
    assert pieces[-1].text == expected_text(server)


def test_an_async_completion_whole_and_streamed(server: Server) -> None:
    async def both() -> tuple[str, str]:
        llm = client(server)
        answer = await llm.acomplete(PROMPT)
        return answer.text, "".join([piece.delta async for piece in await llm.astream_complete(PROMPT)])

    assert asyncio.run(both()) == (expected_text(server), expected_text(server))


def test_a_completion_has_a_logprob_for_every_token(server: Server) -> None:
    answer = client(server, logprobs=True, top_logprobs=2).complete(PROMPT)
    assert len(answer.logprobs) == 24
    assert all(len(alternatives) == 2 for alternatives in answer.logprobs)
    assert all(entry.logprob <= 0 for alternatives in answer.logprobs for entry in alternatives)


def test_a_chat_equals_openais_clients(server: Server) -> None:
    answer = client(server, is_chat_model=True).chat(messages())
    assert answer.message.content == expected_answer(server)


def test_a_streamed_chat_equals_openais_clients(server: Server) -> None:
    pieces = list(client(server, is_chat_model=True).stream_chat(messages()))
    assert "".join(piece.delta or "" for piece in pieces) == expected_answer(server)


def test_an_async_chat_whole_and_streamed(server: Server) -> None:
    async def both() -> tuple[str | None, str]:
        llm = client(server, is_chat_model=True)
        answer = await llm.achat(messages())
        return answer.message.content, "".join(
            [piece.delta or "" async for piece in await llm.astream_chat(messages())]
        )

    assert asyncio.run(both()) == (expected_answer(server), expected_answer(server))


def test_a_chat_without_is_chat_model_uses_completions(server: Server) -> None:
    assert client(server, is_chat_model=False).chat(messages()).message.content


def test_additional_kwargs_set_speculation_and_other_fields(server: Server) -> None:
    options = {"seed": 5, "stop": ["never said"], "extra_body": {"speculation": {"mode": "off"}}}
    answer = client(server, additional_kwargs=options).complete(PROMPT)
    assert answer.text == expected_text(server)
    assert answer.raw.speculation["mode"] == "off"


def test_structured_output_of_a_pydantic_class(server: Server) -> None:
    """The tiny model's output is random: only the server's grammar can make it valid."""
    llm = client(server, is_chat_model=True, should_use_structured_outputs=True, max_tokens=200)
    assert isinstance(llm.as_structured_llm(Weather).chat(messages()).raw, Weather)


def test_a_chat_has_a_logprob_for_every_token(server: Server) -> None:
    answer = client(server, is_chat_model=True, logprobs=True, top_logprobs=2).chat(messages())
    assert len(answer.logprobs) == answer.raw.usage.completion_tokens
    assert all(len(alternatives) == 2 for alternatives in answer.logprobs)
