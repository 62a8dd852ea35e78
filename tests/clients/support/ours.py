"""What our own engine says, asked from an environment that has none of our packages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, cast

PROJECT = Path(__file__).parents[3]
PYTHON = PROJECT / ".venv" / "bin" / "python"
ANSWERS = Path(__file__).with_name("engine_answers.py")


class Ours:
    """The project's own environment; each question is answered by a process of its own."""

    def target(self, config: Path) -> Path:
        """The file of the target model of a configuration."""
        return Path(self._ask("target", str(config)))

    def write_tiny(self, path: Path, architecture: str) -> None:
        """Write a generated model."""
        self._ask("write_tiny", str(path), architecture)

    def encode(self, model: Path, texts: list[str]) -> list[list[int]]:
        """The tokens of texts in which control tokens are read, as in a request's prompt."""
        return cast("list[list[int]]", self._ask("encode", str(model), texts))

    def score(self, model: Path, texts: list[list[int]]) -> list[list[tuple[float, bool]]]:
        """Each token but the first of each text: its log-probability, and whether it is the likeliest."""
        return cast("list[list[tuple[float, bool]]]", self._ask("score", str(model), texts))

    @staticmethod
    def _ask(question: str, *arguments: object) -> Any:
        command = [str(PYTHON), str(ANSWERS), question]
        answer = subprocess.run(
            command, cwd=PROJECT, input=json.dumps(arguments), capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)
