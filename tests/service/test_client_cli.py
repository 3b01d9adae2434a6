"""`xgr client` through the command line's own parser: what it sends, prints and returns."""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.service.scrape import free_port
from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, wait_until
from xgr_runtime.errors import ConfigError
from xgr_runtime.service import service_cli
from xgr_runtime.service.client_stream import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xgr_runtime.types import RecRequest


@pytest.fixture(scope="module")
def engine() -> StandInEngine:
    return StandInEngine()


@pytest.fixture(scope="module")
def target(engine: StandInEngine) -> Iterator[str]:
    with running_in_thread(engine) as address:
        yield address


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="xgr")
    service_cli.add_client_parser(parser.add_subparsers())
    args = parser.parse_args(["client", "--timeout-s", str(PATIENCE_S), *arguments])
    return int(args.handler(args))


def sent(engine: StandInEngine) -> RecRequest:
    return engine.requests[-1]


def test_every_argument_reaches_the_engine(
    target: str, engine: StandInEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = time.monotonic()
    code = run(
        *("--target", target, "--history-ids", "1,2,-3", "--request-id", "r1", "--json"),
        *("--catalog", "films", "--catalog-version", "v2", "--beam-widths", "10,50,80"),
        *("--num-results", "2", "--normalization", "level", "--max-items-per-sid", "4"),
        *("--level-scores", "--require", "a|b", "--require", "c", "--exclude-tags", "d,e"),
        *("--exclude-ids", "7,8", "--exclude-keys", "k", "--exclude-history"),
        *("--on-overflow", "error", "--on-unknown", "skip", "--timeout-s", "1000"),
    )
    assert code == 0
    request = sent(engine)
    search = request.searches[0]
    assert request.history_item_ids is not None
    assert request.history_item_ids.tolist() == [1, 2, -3]
    assert (request.request_id, request.on_overflow, request.on_unknown) == ("r1", "error", "skip")
    assert (search.catalog, search.catalog_version) == ("films", "v2")
    assert (search.beam_width, search.beam_widths) == (None, (10, 50, 80))
    assert (search.num_results, search.normalization) == (2, "level")
    assert (search.max_items_per_sid, search.return_level_scores) == (4, True)
    rules = search.rules
    assert rules.require == (("a", "b"), ("c",))
    assert (rules.exclude_tags, rules.exclude_keys) == (("d", "e"), ("k",))
    assert np.asarray(rules.exclude_item_ids).tolist() == [7, 8]
    assert rules.exclude_history
    assert request.deadline_s is not None
    # gRPC sends what is left in three digits, rounded up.
    assert start_s + 999 < request.deadline_s < time.monotonic() + 1011
    reply = json.loads(capsys.readouterr().out)
    assert reply["request_id"] == "r1"
    assert reply["results"][0]["items"] == [
        {"item_id": 0, "sid": [0, 1, 2], "score": 0.0, "level_scores": [1.0, 1.0, 1.0]},
        {"item_id": 1, "sid": [3, 4, 5], "score": -0.25, "level_scores": [1.0, 1.0, 1.0]},
    ]


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (("--history-ids", ""), "history_item_ids", []),
        (("--history-keys", "a,b"), "history_keys", ["a", "b"]),
        (("--sids", "1-2-3,4-5-6"), "history_sids", [[1, 2, 3], [4, 5, 6]]),
        (("--prompt-token-ids", "5,6"), "prompt_token_ids", [5, 6]),
    ],
)
def test_the_four_inputs(
    target: str, engine: StandInEngine, arguments: tuple[str, ...], field: str, expected: Any
) -> None:
    assert run("--target", target, *arguments) == 0
    given = getattr(sent(engine), field)
    assert (given.tolist() if isinstance(given, np.ndarray) else list(given)) == expected


def test_the_table_for_people(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--catalog", "keys", "--beam-width", "9", "--num-results", "2")
    assert run("--target", target, "--history-ids", "40,2", "--request-id", "q", *options) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("request q: 2 history items used, 0 unknown, 6 prompt tokens, ")
    assert rest == [
        "catalogue keys v1: 2 items of 2 live beams, widths 9-9-9, scores over vocab",
        "rank  item  key    sid    score",
        "   1    42   k0  0-1-2   0.0000",
        "   2    43   k1  3-4-5  -0.2500",
    ]


def test_exit_codes_and_messages(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    history = ("--history-ids", "1")
    cases = [
        (("--target", f"127.0.0.1:{port}"), 3, f"UNAVAILABLE: cannot reach 127.0.0.1:{port}: "),
        (
            ("--target", target, "--catalog", "raise:EngineClosed"),
            3,
            "UNAVAILABLE: the engine has stopped",
        ),
        (
            ("--target", target, "--catalog", "wait", "--timeout-s", "0.2"),
            4,
            f"DEADLINE_EXCEEDED: no answer from {target} within 0.2 s",
        ),
        (("--target", target, "--catalog", "raise:NotFound"), 1, "NOT_FOUND: catalogue 'x' is "),
        (("--target", target, "--catalog", "raise:ZeroDivisionError"), 1, "INTERNAL: internal"),
        (
            ("--target", target, "--catalog", "raise:InvalidRequest"),
            1,
            "INVALID_ARGUMENT: history_item_ids[1]: unknown item; searches[0].beam_widths: ",
        ),
    ]
    for arguments, code, message in cases:
        assert run(*arguments, *history) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"xgr client: {message}")
        assert captured.err.count("\n") == 1
    assert run("--target", target, "--catalog", "failed", *history) == 1
    assert "failed: the model gave NaN in round 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--history-ids", "1", "--sids", "1-2"),
        ("--history-ids", "one"),
        ("--history-ids", "9223372036854775808"),
        ("--sids", "1-2,3"),
        ("--sids", "1--2"),
        ("--history-ids", "1", "--beam-width", "0"),
        ("--history-ids", "1", "--beam-width", "2", "--beam-widths", "2,2"),
        ("--history-ids", "1", "--require", ""),
        ("--history-ids", "1", "--timeout-s", "0"),
        ("--history-ids", "1", "--normalization", "softmax"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


def test_lines_are_answered_in_order(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    for i in range(40):
        search = {"catalog": "wait:0.2" if i % 10 == 0 else "films", "num_results": 1}
        line = {"request_id": f"r{i}", "history_item_ids": [i], "searches": [search]}
        lines += [json.dumps(line), ""]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    assert run("--target", target, "--input", str(path), "--concurrency", "8") == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [reply["request_id"] for reply in replies] == [f"r{i}" for i in range(40)]
    assert [r["results"][0]["items"][0]["item_id"] for r in replies] == list(range(40))
    assert all(reply["client_ms"] >= 150 for reply in replies[::10])


def test_bad_lines_are_answered_in_their_place(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"history_keys": []}\nnonsense\n{"history": [1]}\n{"history_item_ids": [5]}\n')
    with path.open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert run("--target", target, "--input", "-", "--num-results", "1") == 1
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [reply.get("line") for reply in replies] == [None, 2, 3, None]
    assert replies[1]["error"]["code"] == "INVALID_ARGUMENT"
    assert replies[1]["error"]["message"].startswith("line 2: is not JSON: ")
    assert replies[2]["error"]["message"].startswith("history: is not a field; known: ")
    assert replies[3]["results"][0]["items"][0]["item_id"] == 5


def test_the_worst_line_decides_the_exit_code(target: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"history_keys": []}\n')
    unreachable = f"127.0.0.1:{free_port()}"
    assert run("--target", unreachable, "--input", str(path)) == 3
    wait = ("--catalog", "wait", "--timeout-s", "0.2")
    assert run("--target", target, "--input", str(path), *wait) == 4


def test_an_input_that_cannot_be_read_is_a_configuration_error(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.jsonl: No such file"):
        run("--target", target, "--input", str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        run("--target", target, "--input", str(tmp_path))


BAD_LINES: list[tuple[bytes, str]] = [
    (b"[" * 100_000, "line {}: is nested too deep"),
    (b'{"a":' * 100_000, "line {}: is nested too deep"),
    (b"[" * 700 + b"]" * 700, "request: must be an object, got [[[[[["),
    (b"7" * 5000, "line {}: has a number of too many digits"),
    (b'{"history_item_ids": [' + b"7" * 4000 + b"]}", "history_item_ids[0]: must be a 64-bit"),
    (b'{"history_keys": ["\xe9"]}', "line {}: is not UTF-8: "),
    (b'\xff\xfe{"history_keys": []}', "line {}: is not UTF-8: "),
    (b'{"history_keys": [], "history_keys": ["a"]}', "line {}: gives 'history_keys' twice"),
    (b'{"searches": [{"catalog": "a", "catalog": "b"}]}', "line {}: gives 'catalog' twice"),
    (b'{"history_keys": ["\\ud800"]}', "history_keys[0]: must be a string of Unicode"),
    (b'{"request_id": "\\udfff", "history_keys": []}', "request_id: must be a string of"),
    (b'{"\\ud800": 1}', "'\\ud800': is not a field"),
    (b'{"\\u001b[31m' + b"x" * 10_000 + b'": 1}', "'\\x1b[31m"),
    (b'{"history_item_ids": [NaN]}', "history_item_ids[0]: must be a 64-bit whole number"),
    (b'{"history_sids": [[1e400]]}', "history_sids[0][0]: must be a code"),
    (b"\x00", "line {}: is not JSON: "),
    *(
        (b'{"history_keys": [], "searches": [' + search + b"]}", f"searches[0].{name}: must be a")
        for search, name in (
            (b'{"catalog": "\\ud800"}', "catalog"),
            (b'{"catalog_version": "\\ud800"}', "catalog_version"),
            (b'{"rules": {"require": [["a", "\\ud800"]]}}', "rules.require[0][1]"),
            (b'{"rules": {"exclude_tags": ["\\ud800"]}}', "rules.exclude_tags[0]"),
            (b'{"rules": {"exclude_keys": ["\\ud800"]}}', "rules.exclude_keys[0]"),
        )
    ),
]


@pytest.mark.parametrize("from_stdin", [False, True])
def test_no_line_whatsoever_ends_the_stream(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    from_stdin: bool,
) -> None:
    good = b'{"history_item_ids": [5]}'
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(part for bad, _ in BAD_LINES for part in (bad, good)))
    with path.open("rb") as lines:
        monkeypatch.setattr("sys.stdin", lines)
        name = "-" if from_stdin else str(path)
        assert run("--target", target, "--input", name, "--concurrency", "3") == 1
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 2 * len(BAD_LINES)
    replies = [json.loads(line) for line in output.splitlines()]
    assert all(reply["results"][0]["items"][0]["item_id"] == 5 for reply in replies[1::2])
    for i, ((bad, expected), reply) in enumerate(zip(BAD_LINES, replies[::2], strict=True)):
        assert reply["line"] == 2 * i + 1
        assert reply["error"]["code"] == "INVALID_ARGUMENT"
        message = reply["error"]["message"]
        assert message.startswith(expected.format(2 * i + 1)), (bad[:80], message)
        assert len(message) < 500
        assert message.isprintable()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_output_that_fails_ends_the_stream_at_once(
    target: str,
    engine: StandInEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"history_item_ids": [5]}\n' * 300)
    written: list[str] = []

    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            if len(written) > 4:
                raise BrokenPipeError
            return len(text)

    monkeypatch.setattr("sys.stdout", Failing())
    num_before = len(engine.requests)
    with pytest.raises(BrokenPipeError):
        run("--target", target, "--input", str(path), "--concurrency", str(concurrency))
    # What was answered, what may be read ahead, and the line in hand.
    assert len(engine.requests) - num_before <= len(written) + WINDOW * concurrency + 1
    wait_until(
        lambda: all(thread.name != "xgr-client-input" for thread in threading.enumerate()),
        lambda: "the reading thread must end",
    )


def test_no_control_character_reaches_the_terminal(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--target", target, "--history-ids", "1", "--request-id", "r")
    assert run(*arguments, "--catalog", "\x1b[2J\x7f\x9b") == 0
    assert "catalogue \\x1b[2J\\x7f\\x9b v1: " in capsys.readouterr().out
    assert run(*arguments, "--catalog", "\x1b[2J\x7f\x9b", "--json") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["results"][0]["catalog"] == "\x1b[2J\x7f\x9b"
    assert text.rstrip("\n").isprintable()
    assert text.isascii()
    assert run("--target", target, "--history-ids", "1", "--request-id", "\x1b[2J") == 1
    assert capsys.readouterr().err.rstrip("\n").isprintable()
