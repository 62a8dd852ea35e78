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
BODIES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
MESSAGES = [ChatMessage(**message) for message in BODIES]


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


def test_completions_whole_streamed_and_async_equal_openais_clients(server: Server) -> None:
    async def whole_and_streamed() -> tuple[str, str]:
        llm = client(server)
        answer = await llm.acomplete(PROMPT)
        return answer.text, "".join([piece.delta async for piece in await llm.astream_complete(PROMPT)])

    text = expected_text(server)
    answer = client(server).complete(PROMPT)
    assert answer.text == text
    assert answer.raw.speculation["drafted_tokens"] > 0
    pieces = list(client(server).stream_complete(PROMPT))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == text
    assert asyncio.run(whole_and_streamed()) == (text, text)


def test_chats_whole_streamed_and_async_equal_openais_clients(server: Server) -> None:
    async def whole_and_streamed() -> tuple[str | None, str]:
        llm = client(server, is_chat_model=True)
        answer = await llm.achat(MESSAGES)
        pieces = [piece.delta or "" async for piece in await llm.astream_chat(MESSAGES)]
        return answer.message.content, "".join(pieces)

    body: Any = {**SETTINGS, "messages": BODIES}
    text = server.client().chat.completions.create(**body).choices[0].message.content
    llm = client(server, is_chat_model=True)
    assert llm.chat(MESSAGES).message.content == text
    assert "".join(piece.delta or "" for piece in llm.stream_chat(MESSAGES)) == text
    assert asyncio.run(whole_and_streamed()) == (text, text)
    assert client(server, is_chat_model=False).chat(MESSAGES).message.content, "from v1/completions"


def test_answers_have_a_logprob_for_every_token(server: Server) -> None:
    scored: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    completion = client(server, **scored).complete(PROMPT)
    chat = client(server, is_chat_model=True, **scored).chat(MESSAGES)
    assert (len(completion.logprobs), len(chat.logprobs)) == (24, chat.raw.usage.completion_tokens)
    for alternatives in (*completion.logprobs, *chat.logprobs):
        assert len(alternatives) == 2
        assert all(entry.logprob <= 0 for entry in alternatives)


def test_additional_kwargs_set_speculation_and_other_fields(server: Server) -> None:
    options = {"seed": 5, "stop": ["never said"], "extra_body": {"speculation": {"mode": "off"}}}
    answer = client(server, additional_kwargs=options).complete(PROMPT)
    assert answer.text == expected_text(server)
    assert answer.raw.speculation["mode"] == "off"


def test_structured_output_of_a_pydantic_class(server: Server) -> None:
    """The tiny model's output is random: only the server's grammar can make it valid."""
    llm = client(server, is_chat_model=True, should_use_structured_outputs=True, max_tokens=200)
    assert isinstance(llm.as_structured_llm(Weather).chat(MESSAGES).raw, Weather)
