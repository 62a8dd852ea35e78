"""`scripts/stop`: stop what `scripts/serve` started."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.tools import cli, process
from specserve.tools.state import State


def main(arguments: Sequence[str]) -> int:
    """Stop the server of one port; that none runs is no error."""
    parser = cli.Parser(prog="stop", description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="the first of its five ports (default: 8080)")
    port = parser.parse_args(arguments).port
    stopped = process.stop(State.of(port))
    cli.say(f"{'stopped' if stopped else 'nothing runs on'} port {port}.")
    return 0


if __name__ == "__main__":
    cli.run(main)
