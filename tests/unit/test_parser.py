"""Who is parsed first: clients take turns, short bodies pass long ones, and who sends much is refused before others."""

import threading

import pytest

from specserve.api.parser_threads import LONG_BODY, Parser
from specserve.api.response import Response
from specserve.api.routes import Incoming
from specserve.errors import RequestError

MIB = 2**20


class Routes:
    """Records whose requests are parsed; each waits until it may."""

    def __init__(self) -> None:
        self.parsed: list[str] = []
        self.may_begin, self.long_may_begin = threading.Semaphore(0), threading.Event()
        self.long_may_begin.set()

    def generates(self, route: str) -> bool:
        return route == "v1/completions"

    def respond(self, incoming: Incoming) -> Response:
        self.may_begin.acquire(timeout=30)
        if incoming.size > LONG_BODY:
            self.long_may_begin.wait(30)
        self.parsed.append(incoming.request_id)
        return Response()


@pytest.fixture
def routes() -> Routes:
    return Routes()


@pytest.fixture
def parser(routes: Routes) -> Parser:
    return Parser(routes)  # type: ignore[arg-type]


def begin(parser: Parser, name: str, *, size: int = 10) -> None:
    """A request whose name begins with its client's."""
    parser.begin(Incoming(name, "v1/completions", b"", size, {"authorization": name[0]}), 0.0)


def statuses(parser: Parser, routes: Routes) -> dict[str, int]:
    routes.may_begin.release(100)
    taken: dict[str, int] = {}
    while len(parser._parsing):
        for name, parsing in parser.take(idle=True).items():
            error = parsing.response.exception()
            taken[name] = error.status if isinstance(error, RequestError) else 200
    return taken


def test_clients_take_turns(parser: Parser, routes: Routes) -> None:
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        begin(parser, name)
    assert set(statuses(parser, routes).values()) == {200}
    # The thread has begun before or after the second request came.
    assert " ".join(routes.parsed) in {"a1 a2 b1 c1 a3 b2 a4", "a1 b1 c1 a2 b2 a3 a4"}


def test_a_client_that_always_has_two_waiting_starves_no_other(parser: Parser, routes: Routes) -> None:
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        begin(parser, name)
    for count in range(1, 9):
        routes.may_begin.release()
        while len(routes.parsed) < count or routes.parsed[-1] in parser:
            parser.take(idle=True)
        if routes.parsed[-1].startswith("b"):
            begin(parser, f"b{count + 2}")
    assert {"a1", "a2", "a3", "a4"} <= {*routes.parsed}
    statuses(parser, routes)


def test_a_client_that_sends_many_long_bodies_is_refused_and_others_are_not(parser: Parser, routes: Routes) -> None:
    for number in range(5):
        begin(parser, f"a{number}", size=MIB)
    begin(parser, "b0", size=MIB)
    begin(parser, "a5", size=LONG_BODY)
    refused = [name for name, status in statuses(parser, routes).items() if status == 503]
    assert sorted(refused) == ["a2", "a3", "a4"]


def test_a_short_body_waits_for_no_long_one(parser: Parser, routes: Routes) -> None:
    routes.long_may_begin.clear()
    begin(parser, "a1", size=MIB)
    begin(parser, "b1")
    routes.may_begin.release(100)
    taken: dict[str, object] = {}
    while "b1" not in taken:
        taken |= parser.take(idle=True)
    assert routes.parsed == ["b1"]
    routes.long_may_begin.set()
    assert statuses(parser, routes) == {"a1": 200}


def test_a_request_whose_client_has_left_is_not_parsed(parser: Parser, routes: Routes) -> None:
    for name in ("a1", "a2", "b1"):
        begin(parser, name)
    parser.forget_absent({"a1", "b1"})
    assert statuses(parser, routes) == {"a1": 200, "b1": 200}
    assert "a2" not in routes.parsed
