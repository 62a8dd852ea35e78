"""Agents of the command line work on a small repository: no request is refused, no call malformed, and a tool is run.

Whether a model of 1.5 billion parameters does the task well is not asserted.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server import PROJECT
from store import MODEL
from wire import SILENCE_SECONDS, Wire

NPM = PROJECT / ".npm-clients" / "node_modules" / ".bin"
AIDER = PROJECT / ".venv-aider" / "bin" / "aider"
# A small model may go on for ever.
MAX_REQUESTS = 8
# Of the second turn's prompt.
CACHED_SHARE = 0.8
RULES = "You are a coding agent. You call tools to read files, to change them, and to run commands."
TASK = "The test of calc/ops.py fails. Read calc/ops.py, correct it, and run: python3 -m unittest"
# For a model that writes about the tool instead of calling it.
PLAIN_TASKS = [
    "Call the tool {} with the command: cat calc/ops.py",
    "Run this command with your tool {}: python3 -m unittest",
]

OPERATIONS = 'def double(number):\n    """Return twice the number."""\n    return number + 1\n'
TEST = """\
import unittest

from calc.ops import double


class DoubleTest(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(4), 8)
"""


@dataclass(frozen=True)
class Agent:
    """A program with what makes it use our server alone."""

    runner: str  # its tool that runs commands
    command: Callable[[str, Path], list[object]]  # its command line for an instruction and its home directory
    variables: Callable[[Wire], dict[str, str]] = lambda _: {}
    files: Callable[[Wire], dict[str, str]] = lambda _: {}  # in its home directory


def opencode(*, is_small: bool) -> Agent:
    """OpenCode, as it comes, or as an agent with three of its tools."""
    few = {"prompt": RULES, "mode": "primary", "tools": {"*": False, "read": True, "edit": True, "bash": True}}
    small = {"default_agent": "small", "agent": {"small": few, "title": {"disable": True}}} if is_small else {}

    def config(wire: Wire) -> dict[str, str]:
        models = {MODEL: {"limit": {"context": 32768, "output": 1024}}}
        options = {"baseURL": f"{wire.url}/v1", "apiKey": wire.key, "timeout": False}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "specserve", "options": options, "models": models}
        settings = {"model": f"specserve/{MODEL}", "provider": {"specserve": provider}, "share": "disabled", **small}
        return {"opencode.json": json.dumps(settings)}

    return Agent(
        runner="bash",
        command=lambda instruction, _: [NPM / "opencode", "run", instruction],
        # Without these it waits for a network.
        variables=lambda _: {
            "OPENCODE_CONFIG": "HOME/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        files=config,
    )


def codex(*, is_small: bool) -> Agent:
    """Codex, as it comes, or with instructions of one line and few tools."""
    small = """
web_search = "disabled"
model_instructions_file = "HOME/instructions.md"
include_permissions_instructions = false
include_apps_instructions = false
features = {multi_agent = false, goals = false, apps = false, plugins = false}
skills = {include_instructions = false}
"""

    def config(wire: Wire) -> dict[str, str]:
        written = f"""
model = "{MODEL}"
model_provider = "specserve"
check_for_update_on_startup = false
{small * is_small}
[model_providers.specserve]
name = "specserve"
base_url = "{wire.url}/v1"
env_key = "SPECSERVE_KEY"
wire_api = "responses"
stream_idle_timeout_ms = {1000 * SILENCE_SECONDS}
"""
        return {".codex/config.toml": written, "instructions.md": RULES}

    return Agent(
        runner="exec_command",
        command=lambda task, _: [NPM / "codex", "exec", "--dangerously-bypass-approvals-and-sandbox", task],
        variables=lambda wire: {"SPECSERVE_KEY": wire.key},
        files=config,
    )


def claude(*, is_small: bool) -> Agent:
    """Claude Code, as it comes, or in its minimal mode with three of its tools."""
    options = ["--allowedTools", "Read", "Edit", "Bash"]
    options += ["--bare", "--tools", "Read,Edit,Bash", "--system-prompt", RULES] if is_small else []
    return Agent(
        runner="Bash",
        command=lambda instruction, _: [NPM / "claude", "-p", instruction, *options],
        variables=lambda wire: {
            "ANTHROPIC_BASE_URL": wire.url,
            "ANTHROPIC_AUTH_TOKEN": wire.key,
            # What `--bare` asks for; the server reads the other one.
            "ANTHROPIC_API_KEY": wire.key if is_small else "",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "API_TIMEOUT_MS": str(1000 * SILENCE_SECONDS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024" if is_small else "32000",
        },
    )


def continue_() -> Agent:
    def config(wire: Wire) -> dict[str, str]:
        model: dict[str, Any] = {"name": "specserve", "provider": "openai", "model": MODEL, "apiBase": f"{wire.url}/v1"}
        model |= {"apiKey": wire.key, "roles": ["chat", "edit"], "capabilities": ["tool_use"]}
        model |= {"defaultCompletionOptions": {"contextLength": 32768, "maxTokens": 1024}}
        # JSON is YAML.
        return {"config.yaml": json.dumps({"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]})}

    return Agent(
        runner="Bash",
        command=lambda instruction, home: [NPM / "cn", "-p", "--auto", "--config", home / "config.yaml", instruction],
        variables=lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        files=config,
    )


AGENTS = {
    "opencode": opencode(is_small=False),
    "opencode, few tools": opencode(is_small=True),
    "codex": codex(is_small=False),
    "codex, few tools": codex(is_small=True),
    "claude": claude(is_small=False),
    "claude, few tools": claude(is_small=True),
    "continue": continue_(),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    files = {"calc/__init__.py": "", "calc/ops.py": OPERATIONS, "tests/__init__.py": "", "tests/test_ops.py": TEST}
    write(root, files)
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for arguments in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "A package"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


def write(directory: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text.replace("HOME", str(directory)))


def run(command: list[object], wire: Wire, repository: Path, variables: dict[str, str]) -> None:
    """Run an agent to its end, or to its last request, with a home of its own; it may not stand still."""
    home = repository.parent / "home"
    own = {name: value.replace("HOME", str(home)) for name, value in variables.items()}
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **own}
    log = home / "log"
    with log.open("wb") as output:
        words = [str(word) for word in command]
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=repository, env=environment, start_new_session=True, **streams)
        last_request = len(wire.exchanges) + MAX_REQUESTS
        seen: Any = None
        end = 0.0
        try:
            while process.poll() is None and len(wire.exchanges) <= last_request:
                state = len(wire.exchanges), sum(len(exchange.reply) for exchange in wire.exchanges)
                if state != seen:
                    seen, end = state, time.monotonic() + SILENCE_SECONDS
                assert time.monotonic() < end, f"It stands still.\n{log.read_text()}"
                time.sleep(0.1)
            assert process.returncode in {0, None}, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def report(name: str, wire: Wire) -> None:
    """Print what README.md says of an agent, if the test runs with -rP."""
    (first, _), (last, _) = (choose(exchange.prompt_tokens for exchange in wire.exchanges) for choose in (min, max))
    called = " ".join(wire.called) or "nothing"
    cached = ", ".join("/".join(map(str, reversed(exchange.prompt_tokens))) for exchange in wire.exchanges)
    sys.stdout.write(f"{name}: {len(wire.exchanges)} requests of {first} to {last} tokens; called: {called}\n")
    sys.stdout.write(f"{name}: cached: {cached}\n")


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_runs_the_tools_that_the_model_calls(name: str, wire: Wire, repository: Path) -> None:
    agent = AGENTS[name]
    home = repository.parent / "home"
    write(home, {"log": "", **agent.files(wire)})
    for instruction in (TASK, *(task.format(agent.runner) for task in PLAIN_TASKS)):
        run(agent.command(instruction, home), wire, repository, agent.variables(wire))
        if wire.results:
            break
    wire.exchanges = [exchange for exchange in wire.exchanges if exchange.method != "HEAD"]
    report(name, wire)
    assert wire.exchanges
    assert wire.called
    assert wire.results > 0
    # The second turn repeats the first one and what was answered, so all but the tool's result is cached.
    turns = [exchange.prompt_tokens for exchange in wire.exchanges if exchange.results and exchange.prompt_tokens[0]]
    tokens, cached = turns[0]
    assert cached > CACHED_SHARE * tokens


@pytest.mark.parametrize("edit_format", ["whole", "diff"])
def test_aider_changes_a_file_by_the_text_of_an_answer(edit_format: str, wire: Wire, repository: Path) -> None:
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes"]
    server = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{wire.url}/v1", "--openai-api-key", wire.key]
    task = ["--edit-format", edit_format, "--message", "Make double return two times its number.", "calc/ops.py"]
    write(repository.parent / "home", {"log": ""})
    run([AIDER, *quiet, "--yes-always", *server, *task], wire, repository, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    report(f"aider, {edit_format}", wire)
    if edit_format == "whole":
        assert (repository / "calc" / "ops.py").read_text() != OPERATIONS
