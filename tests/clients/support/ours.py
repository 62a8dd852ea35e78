"""Calls our own engine, in the project's own environment, from one that has none of our packages."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast

PROJECT = Path(__file__).parents[3]
PYTHON = PROJECT / ".venv" / "bin" / "python"
SCRIPT = Path(__file__).with_name("engine_answers.py")


def target(config: Path) -> Path:
    """The file of a configuration's target model, which is prepared if it is missing."""
    return Path(_call("target", str(config)))


def encode(model: Path, texts: list[str]) -> list[list[int]]:
    """The tokens of texts in which control tokens are parsed, as in a request's prompt."""
    return cast("list[list[int]]", _call("encode", str(model), texts))


def score(model: Path, texts: list[list[int]]) -> list[list[tuple[float, bool]]]:
    """For each token except the first of each text: its log-probability, and whether it is the argmax."""
    return cast("list[list[tuple[float, bool]]]", _call("score", str(model), texts))


def _call(function: str, *arguments: object) -> Any:
    command = [str(PYTHON), str(SCRIPT), function]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT / "tests" / "support")}
    text = json.dumps(arguments)
    outcome = subprocess.run(
        command, cwd=PROJECT, env=variables, input=text, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)
