"""A request as it comes in, whatever brought it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Incoming:
    """A request that is not parsed yet."""

    request_id: str  # TorchServe's
    route: str  # the path of its URL after the model's version
    body: object  # bytes or a decoded JSON value; None without one
    size: int  # of all that came, in bytes
    headers: Mapping[str, str]  # by name in lower case; several of one name are joined by commas

    @cached_property
    def client(self) -> str:
        """The client, as a hash of the API key, which itself is kept nowhere; clients see nothing of each other."""
        key = self.headers.get("authorization") or self.headers.get("x-api-key", "")
        return hashlib.sha256(key.encode()).hexdigest()[:16]
