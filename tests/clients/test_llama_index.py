"""LlamaIndex's class for OpenAI-like servers returns what OpenAI's own client returns."""

import asyncio
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from server import Server

PROMPT = "The quick brown fox"
SETTINGS = {"model": "tiny", "temperature": 0, "max_tokens": 24}
BODIES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
MESSAGES = [ChatMessage(**message) for message in BODIES]


def client(server: Server, **changes: Any) -> OpenAILike:
    return OpenAILike(api_base=f"{server.url}/v1", api_key=server.key, max_retries=0, **SETTINGS | changes)


def test_completions_whole_streamed_and_async_equal_openais_clients(server: Server) -> None:
    async def whole_and_streamed() -> tuple[str, str]:
        llm = client(server)
        answer = await llm.acomplete(PROMPT)
        return answer.text, "".join([piece.delta async for piece in await llm.astream_complete(PROMPT)])

    body: Any = {**SETTINGS, "prompt": PROMPT}
    text = server.client().completions.create(**body).choices[0].text
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
