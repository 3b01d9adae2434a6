"""The table of providers in ops/ascend/README.md, read so that it can be compared with the registry and with a ladder."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools._ladder.report import NAMES
from tools._ladder.venvs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tools._ladder.report import Outcome, Pair

README = ROOT / "ops" / "ascend" / "README.md"
PROVIDERS = ROOT / "ops" / "ascend"
HEAD = ("op", "provider", "first for", "made of", "checked at", "ran on")
# Rungs whose pairs are providers of the NPU; on L6 the kernels run under another vendor's rules.
JUDGED = ("L2", "L3", "L4", "L5")


@dataclass(frozen=True)
class Row:
    """One provider of one op. first_for: dtypes for which it is bound; made_of: vendor ops or words; rungs: of the ladder."""

    op: str
    provider: str
    first_for: str
    made_of: str
    rungs: tuple[str, ...]
    ran_on: str

    @property
    def pair(self) -> Pair:
        """(op, provider)."""
        return self.op, self.provider


def read_rows(path: Path = README) -> list[Row]:
    """The rows of the table whose head is HEAD. Raises ValueError where there is none or a row is malformed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [_cells(line) for line in lines]
    if HEAD not in cells:
        raise ValueError(f"{path} has no table with the columns {', '.join(HEAD)}")
    rows = []
    for row in cells[cells.index(HEAD) + 2 :]:
        if len(row) != len(HEAD):
            break
        op, provider, first_for, made_of, rungs, ran_on = row
        unknown = [name for name in rungs.split() if name not in NAMES]
        if unknown:
            raise ValueError(f"{path}: unknown rung {unknown[0]!r}; known: {', '.join(NAMES)}")
        rows.append(Row(op, provider, first_for, made_of, tuple(rungs.split()), ran_on))
    return rows


def _cells(line: str) -> tuple[str, ...]:
    """The cells of a line of a table without their code marks; () for any other line."""
    if not line.startswith("|"):
        return ()
    return tuple(cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|"))


def registrations(folder: Path = PROVIDERS) -> list[Pair]:
    """Every (op, provider) under `@impl(op, provider=..., device="npu")`, from the sources: Triton need not be installed."""
    pairs = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            words = {word.arg: word.value for word in node.keywords}
            if node.func.id == "impl" and _text(words.get("device")) == "npu":
                (op,) = (arg.id for arg in node.args if isinstance(arg, ast.Name))
                pairs.append((op, _text(words.get("provider"))))
    return pairs


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def vendor_ops(texts: Iterable[str]) -> set[str]:
    """Every op that sources call as `torch.ops.npu.NAME`."""
    return {name for text in texts for name in re.findall(r"torch\.ops\.npu\.(\w+)", text)}


def mistaken_rows(rows: Sequence[Row], registered: Iterable[Pair]) -> list[str]:
    """Where the table has no row for a registered (op, provider), a row for none, or two rows for one."""
    shown, held = [row.pair for row in rows], set(registered)
    heads = (
        ("no row for", held.difference(shown)),
        ("a row without a provider:", set(shown) - held),
        ("two rows for", {pair for pair in shown if shown.count(pair) > 1}),
    )
    return [
        f"{head} {provider} of {op} in ops/ascend/README.md"
        for head, pairs in heads
        for op, provider in sorted(pairs)
    ]


def differences(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """By rung: where the table says that a passed rung checks a provider and it did not, or does not say that it did."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result != "passed" or outcome.rung not in JUDGED:
            continue
        claimed = {row.pair for row in rows if outcome.rung in row.rungs}
        for op, provider in sorted(claimed ^ set(outcome.providers)):
            says = "says" if (op, provider) in claimed else "does not say"
            found.setdefault(outcome.rung, []).append(
                f"ops/ascend/README.md {says} that {outcome.rung} checks {provider} of {op}"
            )
    return found
