"""Long prompts, of parts of Python's own library as the interpreter has it."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from common import CHAT
from specserve.engine.base import Vocabulary

# Tokens that a question and the chat's own take.
QUESTION = 37
FUNCTION = re.compile(r"^ *def ((?!__)\w+)\(", re.MULTILINE)
RENAME = "```python\n{code}\n```\n\nRename `{name}` to `{name}_of_file`. Return this function whole, and nothing else."


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it, and the number of its tokens."""

    text: str
    tokens: int


class Library:
    """The library's text, largest file first, of which no part is given twice."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
        self._files = iter(sorted(sources, key=lambda path: (-path.stat().st_size, path.name)))
        self._tokens: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next `count` tokens."""
        while len(self._tokens) < count:
            path = next(self._files)
            text = f"# {path.name}\n{path.read_text(encoding='utf-8')}"
            self._tokens += self._vocabulary.encode(text, begin=False)
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return taken

    def edit(self, length: int) -> Prompt:
        """A prompt of about `length` tokens that asks for the longest of its functions under another name."""
        code = ""
        # Some parts are one docstring.
        while len(functions := [*FUNCTION.finditer(code)]) < 2:
            code = self._text(length - QUESTION)
        longest, _ = max(pairwise(functions), key=lambda pair: pair[1].start() - pair[0].start())
        return self._prompt(RENAME.format(code=code, name=longest[1]))

    def _text(self, count: int) -> str:
        """The text of the next `count` tokens, without characters that are cut off."""
        return b"".join(map(self._vocabulary.piece, self.take(count))).decode(errors="ignore")

    def _prompt(self, content: str) -> Prompt:
        text = CHAT.format(prompt=content)
        return Prompt(text, len(self._vocabulary.encode(text, special=True)))
