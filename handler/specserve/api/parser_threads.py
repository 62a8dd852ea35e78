"""Parses requests in threads of their own, so that the engine goes on meanwhile.

Long bodies have a thread to themselves: tokenizing a megabyte may take two seconds, and no short body waits for it.
Within each thread clients take turns.

The threads turn bodies into sequences, which no other thread touches until they are submitted. They share with each
other and with the engine thread only what is safe without a lock: the vocabulary (read only, but for a cache of token
texts where all threads write the same), compiled grammars and matchers (grammar/constraint.py), and `Holdback.draw`
(observability/control_group.py).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from queue import PriorityQueue
from typing import NamedTuple

from specserve.api.response import Response
from specserve.api.routes import Incoming, Routes
from specserve.errors import Contained, RequestError

# Bytes from which a body is long; parsing the JSON of a megabyte takes up to 30 ms.
LONG_BODY = 64 * 1024
# Bytes of all long bodies that may wait. Beyond it a client that has one waiting is refused.
_MAX_WAITING_BYTES = 2 * 1024 * 1024
# Seconds that the engine waits for new requests, most of which take milliseconds; compiling a grammar may take half a
# second, tokenizing half a megabyte a whole one.
_PARSE_SECONDS = 0.1


class Parsing(NamedTuple):
    incoming: Incoming
    arrival: float
    response: Future[Response]  # done once the request is parsed, with an exception if it is refused

    @property
    def is_long(self) -> bool:
        return self.incoming.size > LONG_BODY


class _Thread:
    def __init__(self, parse: Callable[[Incoming], Response]) -> None:
        self._parse = parse
        self._thread = ThreadPoolExecutor(1, "parser")
        # Requests by turn; those of one turn in the order in which they came.
        self._waiting: PriorityQueue[tuple[int, int, Incoming, Future[Response]]] = PriorityQueue()
        self._numbers = count()
        self._turn = 0

    def submit(self, incoming: Incoming, answered: Future[Response], ahead: int) -> None:
        """Have a request parsed after `ahead` others of its client."""
        self._waiting.put((self._turn + ahead + 1, next(self._numbers), incoming, answered))
        self._thread.submit(self._parse_next)

    def _parse_next(self) -> None:
        self._turn, _, incoming, answered = self._waiting.get()
        if not answered.set_running_or_notify_cancel():
            return
        with Contained(incoming.request_id, answered.set_exception):
            answered.set_result(self._parse(incoming))


class Parser:
    """Assigns requests to the two threads, and keeps track of them by TorchServe's id."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._short, self._long = _Thread(routes.respond), _Thread(routes.respond)
        self._parsing: dict[str, Parsing] = {}
        self._waited_for: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parsing

    def begin(self, incoming: Incoming, arrival: float) -> None:
        """Start to parse a request. Routes that generate nothing ask the scheduler, so they are answered at once."""
        parsing = Parsing(incoming, arrival, Future())
        others = [
            other for other in self._parsing.values() if other.is_long == parsing.is_long and not other.response.done()
        ]
        ahead = sum(other.incoming.client == incoming.client for other in others)
        waiting = incoming.size + sum(other.incoming.size for other in others)
        if not self._routes.generates(incoming.route):
            parsing.response.set_result(self._routes.respond(incoming))
        elif parsing.is_long and ahead and waiting > _MAX_WAITING_BYTES:
            sentence = "The server is reading other long requests; send this one again."
            error = RequestError(sentence, status=503, kind="server_error", code="overloaded")
            parsing.response.set_exception(error)
        else:
            (self._long if parsing.is_long else self._short).submit(incoming, parsing.response, ahead)
        self._parsing[incoming.request_id] = parsing

    def take(self, *, idle: bool) -> dict[str, Parsing]:
        """Return the parsed requests, after a short wait for new ones.

        Unless the server is `idle`, it waits only once for a long parse, whatever arrives meanwhile: others stream.
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
