"""What the sources say they call: ops of the vendor (`torch.ops.npu.x`), and the vendor's Python API (`torch.npu.x`, `npu().x`).

Read off the syntax tree, so that a call which no batch reaches is found missing in the recording, and the other way round.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

OPS = "torch.ops.npu."
API_ROOTS = ("torch.npu.", "npu().")


@dataclass(frozen=True)
class ApiCall:
    """A use of the vendor's Python API. num_args, keywords: of the call; None where the name is only read."""

    where: str
    name: str
    num_args: int | None = None
    keywords: tuple[str, ...] = ()


def sources(root: Path) -> list[Path]:
    """The files that may call the vendor."""
    return [*sorted((root / "ops" / "ascend").glob("*.py")), *sorted((root / "xgr_runtime" / "hal").glob("ascend*.py"))]  # fmt: skip


def npu_ops(files: Iterable[Path]) -> dict[str, str]:
    """Name of each `torch.ops.npu.x` -> where it stands."""
    found: dict[str, str] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = _dotted(node)
            if name.startswith(OPS) and name.count(".") == OPS.count("."):
                found.setdefault(name.removeprefix(OPS), f"{path.name}:{_line(node)}")
    return found


def api_calls(files: Iterable[Path]) -> list[ApiCall]:
    """Every use of the vendor's Python API, calls with what they pass."""
    return [call for path in files for call in _api_calls_of(path)]


def _api_calls_of(path: Path) -> Iterator[ApiCall]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = _api_name(_dotted(node)) if isinstance(node, ast.Attribute) else None
        if name is None:
            continue
        where, call = f"{path.name}:{_line(node)}", called.get(id(node))
        if call is None:
            yield ApiCall(where, name)
            continue
        keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
        yield ApiCall(where, name, len(call.args), keywords)


def api_failures(calls: Iterable[ApiCall], vendor: Any) -> list[str]:
    """Uses that the vendor's module does not offer, or not with these arguments. vendor: `torch.npu`."""
    failures = []
    for call in calls:
        target = vendor
        try:
            for part in call.name.split("."):
                target = getattr(target, part)
        except AttributeError:
            failures.append(f"{call.where}: torch.npu.{call.name} does not exist")
            continue
        if call.num_args is not None and (problem := _does_not_take(target, call)):
            failures.append(f"{call.where}: torch.npu.{call.name}: {problem}")
    return failures


def _does_not_take(target: Any, call: ApiCall) -> str | None:
    """Why a call cannot be bound; None where it can, or where the signature is not known (the passes make the call then)."""
    function, args = target, [None] * (call.num_args or 0)
    if inspect.isclass(target):
        makers = [m for m in (target.__init__, target.__new__) if inspect.isfunction(m)]
        if not makers:
            return None
        function, args = makers[0], [None, *args]
    try:
        inspect.signature(function).bind(*args, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def _api_name(dotted: str) -> str | None:
    for root in API_ROOTS:
        if dotted.startswith(root) and not dotted.startswith(OPS):
            return dotted.removeprefix(root)
    return None


class Watched:
    """The vendor's module as the device sees it; `names` are those that were used."""

    def __init__(self, vendor: Any) -> None:
        self._vendor = vendor
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._vendor, name)


def unused_api(calls: Iterable[ApiCall], used: set[str], file: str) -> list[str]:
    """Uses in one file that were never made."""
    return [
        f"{call.where}: torch.npu.{call.name} is in the sources, and no run of the device reached it"
        for call in calls
        if call.where.startswith(f"{file}:") and call.name.split(".")[0] not in used
    ]


def coverage_failures(in_sources: Mapping[str, str], recorded: Iterable[str]) -> list[str]:
    """Vendor ops in the sources that no batch reached, and the other way round (the vendor's own helpers aside)."""
    recorded = set(recorded)
    never = [
        f"{where}: npu::{op} is in the sources, and no batch reached it"
        for op, where in in_sources.items()
        if op not in recorded
    ]
    unknown = sorted(op for op in recorded - set(in_sources) if not op.startswith("_"))
    return never + [f"npu::{op} was called and is not in the sources" for op in unknown]


def _dotted(node: ast.AST) -> str:
    """`a.b().c` as text, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        base = _dotted(node.func)
        return f"{base}()" if base else ""
    return ""


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)
