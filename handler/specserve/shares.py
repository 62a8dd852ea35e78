"""What clients keep on a server, within one limit: nobody can push out what others keep by keeping more."""

from collections import Counter, OrderedDict, defaultdict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Shares(Generic[Key, Value]):
    """Entries by client. Where they exceed the limit, the client with the most loses the one it used longest ago.

    So a client that keeps less than an equal share of the limit loses nothing to others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0  # of the sizes of all entries
        # By client the values with their sizes, least recently used first.
        self._entries: defaultdict[str, OrderedDict[Key, tuple[Value, int]]] = defaultdict(OrderedDict)
        self._sizes: Counter[str] = Counter()

    def use(self, client: str, key: Key) -> Value | None:
        """The client's value of a key, which is its most recently used one now; None without one."""
        if client not in self._entries or key not in self._entries[client]:
            return None
        self._entries[client].move_to_end(key)
        return self._entries[client][key][0]

    def put(self, client: str, key: Key, value: Value, size: int = 1) -> None:
        """Keep a value as the client's most recently used one, and drop others, or itself, until the limit holds."""
        self.remove(client, key)
        self._entries[client][key] = value, size
        self._sizes[client] += size
        self.total += size
        while self.total > self.limit and (entry := self.next_to_go(client)):
            self.remove(*entry[:2])

    def remove(self, client: str, key: Key) -> None:
        _, size = self._entries[client].pop(key, (None, 0))
        self._sizes[client] -= size
        self.total -= size
        if not self._entries[client]:
            del self._entries[client], self._sizes[client]

    def next_to_go(self, client: str) -> tuple[str, Key, Value] | None:
        """Who loses what next: the client with the most, of several this one if it is among them; None if empty."""
        if not self._sizes:
            return None
        owner = max(self._sizes, key=lambda other: (self._sizes[other], other == client))
        key, (value, _) = next(iter(self._entries[owner].items()))
        return owner, key, value
