"""The command `specserve` and the commands in scripts/: the same verbs, one-line errors, and exit codes."""

import errno
import os
import subprocess
import sys
from unittest import mock

import pytest

from specserve import __version__
from specserve.cli import __main__ as specserve
from specserve.cli import models, paths
from specserve.errors import ModelLoadError


def test_every_script_calls_the_verb_of_its_name_which_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for_developers = {"check", "test", "test_clients", "train_draft", "try_upgrade"}
    for path in (paths.PROJECT / "scripts").iterdir():
        if path.is_file() and not path.suffix and path.name not in for_developers:
            assert path.read_text().endswith(f'\nexec "$PYTHON" -m specserve.cli {path.name} "$@"\n')
            with pytest.raises(SystemExit) as ended:
                specserve.main([path.name, "--help"])
            assert ended.value.code == 0
            assert capsys.readouterr().out.startswith(f"usage: scripts/{path.name} ")


def test_help_and_version_import_no_tool() -> None:
    program = (
        "import sys; from specserve.cli.__main__ import main\n"
        "try: main([sys.argv[1]])\n"
        "finally: print(sorted({'requests', 'rich', 'llama_cpp', 'numpy'} & set(sys.modules)))"
    )
    for option, shown in (("--help", "fetch_models"), ("--version", f"specserve {__version__}\n")):
        outcome = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True, check=True)
        assert shown in outcome.stdout
        assert outcome.stdout.endswith("\n[]\n")


def test_a_usage_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["sing"], "argument VERB: invalid choice: 'sing'"),
        (["fetch_models"], "the following arguments are required: FILE; `scripts/fetch_models --help` lists"),
        (["archive", "--fast"], "unrecognized arguments: --fast; `specserve --help` lists"),
        (["fetch_models", "absent.yaml"], "absent.yaml: cannot be read (No such file or directory)."),
        (["stop", "--port", "80"], "--port 80: must lie between 1024 and 65531"),
        (["stop", "--port", "65532"], "--port 65532: must lie between 1024 and 65531"),
    ):
        assert specserve.main(arguments) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"specserve: {sentence}")
        assert printed.count("\n") == 1


def test_what_a_verb_raises_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for error, code, line in (
        (ModelLoadError("m.gguf: is no GGUF."), 3, "m.gguf: is no GGUF."),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/there"), 1, "/there: Permission denied."),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device."),
        (ModuleNotFoundError(name="rich"), 1, f"{sys.executable} does not have the package rich; the commands"),
        (KeyboardInterrupt(), 130, "interrupted."),
    ):
        with mock.patch.object(models, "run_prepare", side_effect=error):
            assert specserve.main(["prepare", "FILE"]) == code
        assert capsys.readouterr().err.startswith(f"specserve: {line}")


def test_a_reader_that_leaves_ends_a_command_without_a_word() -> None:
    """As `scripts/doctor | head` does."""
    program = (
        "from specserve.cli import __main__, models\n"
        "def many(_):\n    for n in range(10**6):\n        print(n, flush=True)\n"
        "models.run_prepare = many\n"
        "__main__.sys.exit(__main__.main(['prepare', 'FILE']))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (141, b"")


def test_text_that_the_locale_cannot_spell_is_no_traceback() -> None:
    program = (
        "from specserve.cli import __main__, models\n"
        "models.run_prepare = lambda _: print(input() + ' \\u4e16') or 0\n"
        "__main__.sys.exit(__main__.main(['prepare', 'FILE']))"
    )
    for encoding, shown in (("latin-1", b"gr\xfcn ?\n"), ("utf-8", "gr\ufffdn \u4e16\n".encode())):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", program]
        outcome = subprocess.run(command, input=b"gr\xfcn\n", capture_output=True, env=environment, check=False)
        assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, shown, b"")
