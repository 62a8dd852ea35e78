"""TorchServe with a Llama pair (SentencePiece); test_server.py has a Qwen2 pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server import Server, running
from tiny_config import tiny_config

pytestmark = pytest.mark.server

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(config=tiny_config(tmp_path_factory.mktemp("config"), "llama")) as server:
        yield server


def complete(server: Server, **changes: Any) -> Any:
    """A greedy completion through OpenAI's client."""
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, **changes}
    return server.client().completions.create(**body)


def test_speculation_does_not_change_greedy_output(server: Server) -> None:
    plain = complete(server, extra_body={"speculation": {"mode": "off"}}, max_tokens=60)
    # Lookups alone may be right every time.
    speculative = complete(server, extra_body={"speculation": {"drafter": "model"}}, max_tokens=60)
    assert len(plain.choices[0].text) > 24
    assert speculative.choices[0].text == plain.choices[0].text
    statistics = speculative.model_extra["speculation"]
    assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"]


def test_a_stream_has_the_text_of_the_whole_response(server: Server) -> None:
    for prompt in ("héllo 世界 🙂", ""):
        fields: Any = {"prompt": prompt, "seed": 4, "temperature": 1, "max_tokens": 80}
        streamed = "".join(chunk.choices[0].text for chunk in complete(server, stream=True, **fields))
        assert streamed == complete(server, **fields).choices[0].text


def test_a_chat_uses_the_models_template(server: Server) -> None:
    completions = server.client().chat.completions
    whole = completions.create(**CHAT)
    assert whole.choices[0].message.content
    # The rendered messages as a plain prompt have the same output.
    assert (
        complete(server, prompt="<|user|>\nHi</s>\n<|assistant|>\n").choices[0].text == whole.choices[0].message.content
    )
    chunks = completions.create(**CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_the_worker_logged_no_handler_error_and_was_not_restarted(server: Server) -> None:
    """The last test of this file: nothing above raised in the handler or restarted the worker."""
    log = server.log()
    assert "specserve: request " not in log
    assert "Invoking custom service failed" not in log
    assert log.count("specserve: a pass of one token takes") == 1
