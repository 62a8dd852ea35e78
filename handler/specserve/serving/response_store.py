"""Conversations that v1/responses can continue, in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from specserve.errors import RequestError


class ResponseStore:
    """Keeps the messages of the last responses, the answers included, for requests that continue one of them.

    The parser's thread reads while TorchServe's writes: each step is one operation of a dictionary.

    Args:
        size: how many responses, maybe none; those that were not used for longest give way.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # By client, as its API key names it, and id.
        self._messages: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()

    def put(self, client: str, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages of a response to a client, and those before it."""
        self._messages[client, response_id] = messages
        while len(self._messages) > self.size:
            self._messages.popitem(last=False)

    def messages(self, client: str, response_id: str | None) -> list[dict[str, Any]]:
        """Return the messages of a response to this client, none without an id.

        Raises:
            RequestError: 400; it is not kept.
        """
        if response_id is None:
            return []
        messages = self._messages.pop((client, response_id), None)
        if messages is None:
            kept = f"the last {self.size} responses, and not '{response_id}'" if self.size else "no responses"
            sentence = f"This server keeps {kept}: send the whole conversation as 'input'."
            raise RequestError(sentence, param="previous_response_id", code="previous_response_not_found")
        self.put(client, response_id, messages)
        return messages
