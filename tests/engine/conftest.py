"""Fixtures of this directory. mypy leaves this file out, since tests/torchserve has another module of its name."""

from tiny_fixtures import architecture, files, tiny, variant

__all__ = ["architecture", "files", "tiny", "variant"]
