"""Parses requests in threads of their own, so that the engine goes on meanwhile.

Long bodies have a thread to themselves: tokenizing a megabyte may take two seconds, and no short body waits for it.
Within each thread clients take turns.

The threads turn bodies into generations, which no other thread touches until they are submitted. They share with each
other and with the engine thread only what is safe without a lock: the vocabulary (read only, but for a cache of token
texts where all threads write the same), compiled grammars and matchers (grammar/constraint.py), and `Holdback.draw`
(observability/control_group.py).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import NamedTuple

from specserve.api.incoming import Incoming
from specserve.api.response import Response
from specserve.api.routes import Routes
from specserve.errors import Contained, RequestError

# Bytes from which a body is long; parsing the JSON of a megabyte takes up to 30 ms.
LONG_BODY = 64 * 1024
# Bytes of all long bodies that may wait. Beyond it a client that has one waiting is refused.
_MAX_WAITING_BYTES = 2 * 1024 * 1024
# Seconds that the engine waits for new requests, most of which take milliseconds; compiling a grammar may take half a
# second, tokenizing half a megabyte a whole one.
_PARSE_SECONDS = 0.1

_BUSY = RequestError(
    "The server is reading other long requests; send this one again.",
    status=503,
    kind="server_error",
    code="overloaded",
)


class Parsing(NamedTuple):
    """A new request: its client, its time of arrival, its size in bytes, and its response once it is parsed."""

    client: str
    arrival: float
    size: int
    response: Future[Response]


class _Thread:
    """Parses requests one after the other; clients take turns.

    Args:
        parse: makes the response to a request.
    """

    def __init__(self, parse: Callable[[Incoming], Response]) -> None:
        self._parse = parse
        self._thread = ThreadPoolExecutor(1, "parser")
        # By client, the one whose turn it is first.
        self._waiting: OrderedDict[str, deque[tuple[Incoming, Future[Response]]]] = OrderedDict()
        self._lock = Lock()

    def submit(self, incoming: Incoming) -> Future[Response]:
        answered: Future[Response] = Future()
        with self._lock:
            self._waiting.setdefault(incoming.client, deque()).append((incoming, answered))
        self._thread.submit(self._parse_next)
        return answered

    def _parse_next(self) -> None:
        with self._lock:
            client, requests = self._waiting.popitem(last=False)
            incoming, answered = requests.popleft()
            if requests:
                self._waiting[client] = requests
        if not answered.set_running_or_notify_cancel():
            return
        # `respond` contains errors itself; if even writing the error fails, the request still has to end.
        with Contained(incoming.request_id, answered.set_exception):
            answered.set_result(self._parse(incoming))


class Parser:
    """Assigns requests to the two threads, and keeps track of them by TorchServe's id.

    Args:
        routes: parse them.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._short, self._long = _Thread(routes.respond), _Thread(routes.respond)
        self._parsing: dict[str, Parsing] = {}
        self._waited_for: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        """Tell whether a request is being parsed."""
        return request_id in self._parsing

    def begin(self, incoming: Incoming, arrival: float) -> None:
        """Start to parse a request. Routes that generate nothing ask the scheduler, so they are answered at once.

        Args:
            incoming: the request.
            arrival: when it came.
        """
        route, size = incoming.route, incoming.size
        answered: Future[Response] = Future()
        if not self._routes.generates(route):
            answered.set_result(self._routes.respond(incoming))
        elif size > LONG_BODY and self._has_too_much(incoming):
            answered.set_result(self._routes.refusal(route, _BUSY))
        else:
            answered = (self._long if size > LONG_BODY else self._short).submit(incoming)
        self._parsing[incoming.request_id] = Parsing(incoming.client, arrival, size, answered)

    def _has_too_much(self, incoming: Incoming) -> bool:
        """Whether the long bodies would exceed the limit, and the client already has one waiting."""
        others = [other for other in self._parsing.values() if other.size > LONG_BODY and not other.response.done()]
        waiting = sum(other.size for other in others)
        return waiting + incoming.size > _MAX_WAITING_BYTES and incoming.client in {other.client for other in others}

    def take(self, *, idle: bool) -> dict[str, Parsing]:
        """Return the parsed requests, after a short wait for new ones.

        While others stream, it waits only once for a long parse, whatever arrives meanwhile.

        Args:
            idle: nothing else runs, so waiting delays no request.
        """
        waits = idle or not self._waited_for & self._parsing.keys()
        wait([parsing.response for parsing in self._parsing.values()], _PARSE_SECONDS if waits else 0.0)
        parsed = {request_id: parsing for request_id, parsing in self._parsing.items() if parsing.response.done()}
        for request_id in parsed:
            del self._parsing[request_id]
        self._waited_for = set(self._parsing)
        return parsed

    def forget_absent(self, present: set[str]) -> None:
        """Forget the requests whose clients have left."""
        for request_id in self._parsing.keys() - present:
            self._parsing.pop(request_id).response.cancel()
