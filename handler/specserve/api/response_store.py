"""Conversations that v1/responses can continue, in memory."""

from __future__ import annotations

from threading import Lock
from typing import Any

from specserve.errors import RequestError
from specserve.shares import Shares


class ResponseStore:
    """Keeps the messages of the last responses, the answers included, for requests that continue one of them.

    The parser's threads read while TorchServe's writes. Clients share the `size` (shares.py), which may be 0.
    """

    def __init__(self, size: int) -> None:
        self._messages: Shares[str, list[dict[str, Any]]] = Shares(size)
        self._lock = Lock()

    def put(self, client: str, response_id: str, messages: list[dict[str, Any]]) -> None:
        with self._lock:
            self._messages.put(client, response_id, messages)

    def messages(self, client: str, response_id: str | None) -> list[dict[str, Any]]:
        """Return the messages of a response to this client, none without an id; raise a 400 if it is not kept."""
        if response_id is None:
            return []
        with self._lock:
            messages = self._messages.use(client, response_id)
        if messages is None:
            size = self._messages.limit
            kept = f"the last {size} responses, and not '{response_id}'" if size else "no responses"
            sentence = f"This server keeps {kept}: send the whole conversation as 'input'."
            raise RequestError(sentence, param="previous_response_id", code="previous_response_not_found")
        return messages
