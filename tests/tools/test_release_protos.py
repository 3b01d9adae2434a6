"""The wire keeps its rules and what was released: `buf lint` and `buf breaking`, and both seen to fail."""

import shutil
from pathlib import Path

import pytest

from tools import release_protos

PROTO = Path("proto/xgr/v1/recommend.proto")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A copy of the protos that a test may change."""
    (tmp_path / PROTO).parent.mkdir(parents=True)
    for name in ("buf.yaml", PROTO):
        shutil.copy(release_protos.ROOT / name, tmp_path / name)
    return tmp_path


def change(workspace: Path, old: str, new: str) -> None:
    text = (workspace / PROTO).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (workspace / PROTO).write_text(text.replace(old, new), encoding="utf-8")


def test_the_protos_keep_every_rule_and_what_was_released() -> None:
    assert release_protos.lint(release_protos.ROOT) == []
    assert release_protos.breaking(release_protos.ROOT) == []


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("bool has_keys = 8;", "bool has_keys = 18;", 'Previously present field "8"'),
        ("double run_ms = 2;", "float run_ms = 2;", "run_ms"),
        ("bytes scores = 7;", "bytes points = 7;", '"scores" to "points"'),
        ("ON_UNKNOWN_ERROR = 2;", "ON_UNKNOWN_REFUSE = 2;", "ON_UNKNOWN_ERROR"),
        ("rpc Recommend(", "rpc Suggest(", 'Previously present RPC "Recommend"'),
    ],
)
def test_a_breaking_edit_is_caught(workspace: Path, old: str, new: str, text: str) -> None:
    change(workspace, old, new)
    found = release_protos.breaking(workspace)
    assert any(text in line for line in found), found


def test_an_addition_breaks_nothing(workspace: Path) -> None:
    change(
        workspace, "  Timings timings = 9;", "  Timings timings = 9;\n  // New.\n  bool new = 10;"
    )
    assert release_protos.breaking(workspace) == []
    assert release_protos.lint(workspace) == []


def test_an_unexplained_field_is_caught(workspace: Path) -> None:
    change(workspace, "  Timings timings = 9;", "  Timings timings = 9;\n  bool newField = 10;")
    found = "\n".join(release_protos.lint(workspace))
    assert "newField" in found
    assert "non-empty comment" in found
    assert "lower_snake_case" in found
