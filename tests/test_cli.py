"""The `xgr` command as a process: what reaches the terminal when something outside fails, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, PROCESS_S
from tests.service.world import make_world
from xgr_runtime.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[1]
XGR: tuple[str | bytes, ...] = (sys.executable, "-m", "xgr_runtime.cli")
CLIENT = ("client", "--timeout-s", str(PATIENCE_S))
LINE = json.dumps({"history_item_ids": [1]}) + "\n"


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with running_in_thread(StandInEngine()) as address:
        yield address


def run(*arguments: str | bytes, **options: Any) -> tuple[int, str]:
    """The exit code and standard error."""
    options.setdefault("stdout", subprocess.DEVNULL)
    done = subprocess.run(
        (*XGR, *arguments),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})},
        stderr=subprocess.PIPE,
        timeout=PROCESS_S,
        check=False,
        **options,
    )
    return done.returncode, done.stderr.decode()


def run_all(commands: Sequence[Sequence[str | bytes]], **options: Any) -> list[tuple[int, str]]:
    """What came of each command; two at a time, as starting Python and torch takes longest."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: run(*command, **options), commands))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_fails_is_one_line_and_exit_code_5(
    target: str, tmp_path: Path, unbuffered: str
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text(LINE)
    many = tmp_path / "many.jsonl"
    many.write_text(LINE * 300)
    client = (*CLIENT, "--target", target)
    commands = (
        ("--help",),
        ("--version",),
        ("config", "show"),
        ("doctor",),
        ("catalog", "build", "--help"),
        (*client, "--history-ids", "1"),
        (*client, "--history-ids", "1", "--json"),
        (*client, "--input", str(requests)),
        (*client, "--input", str(many), "--concurrency", "4"),
    )
    with open("/dev/full", "w") as full:
        ends = run_all(commands, stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    for command, end in zip(commands, ends, strict=True):
        assert end == (5, "xgr: [Errno 28] No space left on device\n"), command


def test_a_server_that_cannot_say_where_it_listens_ends(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    with open("/dev/full", "w") as full:
        arguments = ("serve", "--config", str(world.config), "--log-level", "error")
        assert run(*arguments, stdout=full) == (5, "xgr: [Errno 28] No space left on device\n")


def test_a_reader_that_goes_away_ends_the_stream_without_a_word(
    target: str, tmp_path: Path
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(LINE * 300)
    arguments = (*CLIENT, "--target", target, "--input", str(many), "--concurrency", "4")
    with subprocess.Popen(
        (*XGR, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline()
            process.stdout.close()
            assert process.wait(PROCESS_S) == 141
            assert process.stderr.read() == b""
        finally:
            process.kill()


@pytest.mark.parametrize("end", ["output", "interrupt"])
def test_a_silent_pipe_as_input_holds_nothing_up(target: str, end: str) -> None:
    arguments = (*CLIENT, "--target", target, "--input", "-", "--concurrency", "4")
    with ExitStack() as stack:
        full = stack.enter_context(open("/dev/full", "wb"))
        process = stack.enter_context(
            subprocess.Popen(
                (*XGR, *arguments),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=full if end == "output" else subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(LINE.encode())
        process.stdin.flush()
        if process.stdout is not None:
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
        code = process.wait(PROCESS_S)  # the pipe says nothing for ever
        expected = (
            (5, b"xgr: [Errno 28] No space left on device\n")
            if end == "output"
            else (130, b"xgr: interrupted\n")
        )
        assert (code, process.stderr.read()) == expected


def test_bytes_that_are_no_text_and_few_characters_are_one_line(target: str) -> None:
    client = (*CLIENT, "--target", target)
    cases: tuple[tuple[tuple[str | bytes, ...], int, str], ...] = (
        ((*client, "--history-keys", b"a\xff"), 1, "history_keys"),
        ((*client, "--history-keys", "a", "--catalog", b"\xff"), 1, "searches[0].catalog"),
        ((*client, "--history-keys", "a", "--require", b"\xff"), 1, "searches[0].rules.require"),
        ((*client, "--history-keys", "a", "--request-id", b"\xff"), 1, "request_id"),
        (("client", "--target", b"\xff:1", "--history-keys", "a"), 2, "a target is"),
        ((*client, "--input", b"\xff.jsonl"), 2, "cannot read"),
        (("config", "show", "--config", b"\xff.yaml"), 2, "cannot read"),
        (("config", "show", "--set", b"device=\xff"), 2, "device"),
        (("catalog", "info", b"\xff.xgrc"), 2, "xgrc"),
        (("serve", "--config", b"\xff.yaml"), 2, "cannot read"),
        (("\x1b[31m",), 2, "\\x1b[31m"),
    )
    ends = run_all([arguments for arguments, _, _ in cases])
    for (arguments, expected, text), (code, errors) in zip(cases, ends, strict=True):
        assert code == expected, (arguments, errors)
        assert text in errors, (arguments, errors)
        assert "Traceback" not in errors
        assert "\x1b" not in errors
        assert errors.rstrip("\n").count("\n") == (1 if arguments[0] == "\x1b[31m" else 0), errors
    # A table whose keys the terminal cannot show.
    assert run(
        *(*client, "--history-keys", "a", "--request-id", "r", "--catalog", "é"),
        env={"PYTHONIOENCODING": "ascii"},
    ) == (0, "")


def test_ctrl_c_during_a_command_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xgr_runtime.cli.build_parser", interrupted)
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == "xgr: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(5, "Input/output error"), 5, "xgr: [Errno 5] Input/output error\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: OSError,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr("xgr_runtime.cli.build_parser", refuse)
    assert main(["--version"]) == code
    assert capsys.readouterr().err == text


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "5 the output could not be written" in text
    assert "141 the reader" in text
