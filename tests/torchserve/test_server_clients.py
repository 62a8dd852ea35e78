"""Clients of one server, told apart by their keys however their HTTP library spells the header's name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import requests

from server import PATIENCE_SECONDS, Server, running
from tiny_config import tiny_config

pytestmark = pytest.mark.server

SPELLINGS = ["Authorization", "authorization", "AUTHORIZATION"]
_numbers = count()


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes any key, as behind a proxy that checks them."""
    config = tiny_config(tmp_path_factory.mktemp("config"), handler={"responses_store": 100})
    with running("--no-auth", config=config) as server:
        yield server


def keys() -> tuple[str, str]:
    """Two keys that no other test has used."""
    return f"Bearer mine-{next(_numbers)}", f"Bearer other-{next(_numbers)}"


def post(server: Server, route: str, spelling: str, key: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(server.url + route, json=body, headers={spelling: key}, timeout=PATIENCE_SECONDS)


def test_lookups_find_what_the_same_key_wrote_alone(open_server: Server) -> None:
    speculation = {"mode": "fixed", "gamma": 8, "drafter": "lookup"}
    body = {"prompt": "abcd", "max_tokens": 80, "temperature": 0, "ignore_eos": True, "speculation": speculation}
    for spelling in SPELLINGS:
        mine, other = keys()
        sent = [("Authorization", mine), (spelling, other), (spelling, mine)]
        answers = [post(open_server, "/v1/completions", *name_and_key, body).json() for name_and_key in sent]
        alone, others, after = (answer["speculation"]["accepted_tokens"] for answer in answers)
        assert others == alone
        assert after > alone + 20


def test_a_kept_response_is_continued_by_the_same_key_alone(open_server: Server) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "temperature": 0}
    for spelling in SPELLINGS:
        mine, other = keys()
        kept = post(open_server, "/v1/responses", "Authorization", mine, body).json()["id"]
        asked = {**body, "previous_response_id": kept}
        refused, continued = (post(open_server, "/v1/responses", spelling, key, asked) for key in (other, mine))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert continued.status_code == 200


def test_cached_tokens_are_those_that_the_same_key_sent(open_server: Server) -> None:
    for spelling in SPELLINGS:
        mine, other = keys()
        body = {"prompt": f"What only the first of them knows, {mine}: " * 3, "max_tokens": 1, "temperature": 0}
        sent = [("Authorization", mine), (spelling, other), (spelling, mine)]
        answers = [post(open_server, "/v1/completions", *name_and_key, body).json()["usage"] for name_and_key in sent]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in answers]
        assert cached == [0, 0, answers[0]["prompt_tokens"] - 1]
