"""The command `specserve` and the commands in scripts/: the same verbs, called only when they are needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from specserve import __version__
from specserve.cli import __main__ as specserve
from specserve.cli import cli, paths
from specserve.errors import ConfigError, EnvironmentFailure

SCRIPTS = sorted(path for path in (paths.PROJECT / "scripts").iterdir() if path.suffix not in {".sh", ".cmake"})
# For those who work on specserve; the others are for those who use it.
DEVELOPERS = {"check", "test", "test_clients"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as scripts/ do."""
    command = [sys.executable, "-m", "specserve.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_path_that_the_locale_cannot_spell_is_read_as_utf_8() -> None:
    """Its characters were halves of surrogate pairs, and the first file with its name was a traceback."""
    code = "from specserve.cli import cli; cli.run(lambda arguments: print(ascii(arguments)) or 0)"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    ran = subprocess.run([sys.executable, "-c", code, "/ü"], env=environment, capture_output=True, check=False)
    assert (ran.stdout, ran.returncode) == (b"['/\\xfc']\n", 0)


def test_pip_installs_the_command() -> None:
    with (paths.PROJECT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["scripts"]
    installed = {entry.name: entry for entry in entry_points(group="console_scripts")}
    assert {name: installed[name].value for name in declared} == declared
    assert installed["specserve"].load() is specserve.run


def test_every_script_for_users_calls_the_verb_of_its_name() -> None:
    assert {path.name for path in SCRIPTS} == DEVELOPERS | set(cli.VERBS)
    for path in SCRIPTS:
        if path.name not in DEVELOPERS:
            assert path.read_text().endswith(f'\nexec "$PYTHON" -m specserve.cli {path.name} "$@"\n')


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb_with_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert specserve.main(arguments) == 0
    shown = dict(re.findall(r"^  (\w+) +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert shown == {name: verb.sentence for name, verb in cli.VERBS.items()}
    for sentence in shown.values():
        assert re.fullmatch(r"[A-Z].*\.", sentence)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        specserve.main([verb, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: scripts/{verb} " in shown
    assert cli.VERBS[verb].sentence in shown


def test_text_that_the_locale_cannot_spell_is_no_traceback() -> None:
    program = "from specserve.cli import cli; cli.run(lambda _arguments: cli.say(input() + ' \u4e16') or 0)"
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    outcome = subprocess.run(
        [sys.executable, "-c", program], input=b"gr\xfcn\n", capture_output=True, env=latin, check=False
    )
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"gr\xfcn ?\n", b"")
    utf8 = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    outcome = subprocess.run(
        [sys.executable, "-c", program], input=b"gr\xfcn\n", capture_output=True, env=utf8, check=False
    )
    assert (outcome.returncode, outcome.stdout.decode()) == (0, "gr\ufffdn \u4e16\n")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert specserve.main(["--version"]) == 0
    assert capsys.readouterr().out == f"specserve {__version__}\n"


def test_unknown_verb_is_one_sentence_and_exit_code_2() -> None:
    outcome = run("sing", "--loudly")
    assert outcome.returncode == ConfigError.exit_code == 2
    assert outcome.stderr == "specserve: there is no command 'sing'; `specserve --help` lists them.\n"
    assert not outcome.stdout


def test_advice_names_the_command_in_the_way_in_which_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/anywhere/bin/specserve", "archive"])
    with pytest.raises(ConfigError, match=r"^archive: unrecognized arguments: --fast; `specserve archive --help`"):
        specserve.main(["archive", "--fast"])
    monkeypatch.setattr(sys, "argv", ["/anywhere/specserve/cli/__main__.py", "archive"])
    with pytest.raises(ConfigError, match=r"^archive: unrecognized arguments: --fast; `scripts/archive --help`"):
        specserve.main(["archive", "--fast"])


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.VERBS, "sing", cli.Verb("song", "Sing."))
    with pytest.raises(EnvironmentFailure, match=r"^sing needs the package specserve\.cli\.song, .*scripts/sing"):
        specserve.main(["sing"])


def test_a_package_without_the_repository_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "DEFAULT_CONFIG", tmp_path / "config" / "default.yaml")
    with pytest.raises(EnvironmentFailure, match="is no clone of specserve's repository"):
        specserve.main(["serve"])


def test_help_and_version_import_no_tool() -> None:
    program = (
        "import sys; from specserve.cli.__main__ import main; main(['--help'])\n"
        "print(sorted({'requests', 'rich', 'llama_cpp', 'numpy'} & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.endswith("\n[]\n")
