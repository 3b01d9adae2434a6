"""The rules of the house as functions over source text, so that each can be shown to fail."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A layer may import itself and what stands to its left. kvcache and xbeam stand side by side, and so do
# service and conformance. `config` is all of config_*,
# but for the command. What comes with the package (`shipped`) is for commands.
LAYERS: dict[str, tuple[str, ...]] = {
    "types": (),
    "errors": (),
    "files": ("errors",),
    "shipped": ("errors",),
    "config": ("types", "errors", "files"),
    "hal": ("types", "errors", "files", "config"),
    "kvcache": ("types", "errors", "files", "config", "hal"),
    "xbeam": ("types", "errors", "files", "config", "hal"),
    "models": ("types", "errors", "files", "config", "hal", "kvcache"),
    "xschedule": ("types", "errors", "files", "config", "hal", "kvcache", "xbeam", "models"),
    "service": (
        *("types", "errors", "files", "config", "hal", "kvcache", "xbeam", "models"),
        "xschedule",
    ),
    "conformance": (
        *("types", "errors", "files", "config", "hal", "kvcache", "xbeam", "models"),
        "xschedule",
    ),
}
ROOT = "xgr_runtime"
DEVICE_MODULES = ("torch.cuda", "torch_npu", "triton")
DEVICE_FOLDERS = ("xgr_runtime/hal/", "ops/")
GENERATED = "xgr_runtime/service/_pb/"

TORCH_FREE = tuple(
    re.compile(pattern)
    for pattern in (
        r"xgr_runtime/(__init__|types|errors|files|shipped|config\w*)\.py",
        r"xgr_runtime/kvcache/(allocator|prefix_\w+)\.py",
        r"xgr_runtime/xbeam/(catalog\w*|npz_archive|token_map|trie|rules\w*|template\w*|ranking)\.py",
        r"xgr_runtime/xschedule/(scheduler|request\w*|batch|buckets|capacities|history)\.py",
        r"xgr_runtime/xschedule/(totals|histogram|engine_stats|stage_times|rule_rows)\.py",
        r"xgr_runtime/service/translate\w*\.py",
    )
)
# Paths of a developer's machine: they work nowhere else.
MACHINE_PATHS = re.compile(
    r"""(?<![\w.~$}/<-])/(?:home/\w|Users/\w|root/|work/|mnt/\w|workspace/|opt/venv)""",
)
MUTABLE_CALLS = (
    "dict",
    "list",
    "set",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "bytearray",
)
# The registry is the one place where importing a module adds to shared state.
MAY_HOLD_STATE = ("xgr_runtime/hal/registry.py",)


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def imported_modules(tree: ast.AST, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in the file, `from a import b` as a.b; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _package_of(path: str) -> str:
    return ".".join(path.removesuffix(".py").split("/")[:-1])


def _is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _layer_named(name: str) -> str | None:
    if name.startswith("config_") and not _is_command(name):
        return "config"
    return name if name in LAYERS else None


def _is_command(name: str) -> bool:
    return name == "cli" or name.endswith("_cli")


def layer_of(path: str) -> str | None:
    """The layer a file belongs to; None for the package's front (`__init__`, `doctor`, commands) and other trees."""
    parts = path.removesuffix(".py").split("/")
    return _layer_named(parts[1]) if len(parts) > 1 and parts[0] == ROOT else None


def import_edges(path: str, source: str) -> list[Finding]:
    """Imports inside xgr_runtime that point right or to the package's front, and imports of the providers by the runtime.

    Commands inside a layer may import other commands and what comes with the package.
    """
    layer = layer_of(path)
    if layer is None:
        return []
    findings = []
    for line, name in imported_modules(ast.parse(source), _package_of(path)):
        if _is_below(name, "xgr_ops"):
            findings.append(
                Finding(path, line, f"imports {name}; providers depend on hal, never the reverse")
            )
        if not name.startswith(ROOT + "."):
            continue
        reason = _why_not(path, layer, name.split(".")[1:])
        if reason:
            findings.append(Finding(path, line, f"{layer} imports {name}; {reason}"))
    return findings


def _why_not(path: str, layer: str, names: list[str]) -> str:
    """Why a file of the layer may not import what these names below the root lead to; "" when it may."""
    if _is_command(path.removesuffix(".py").split("/")[-1]):
        if names[0] == "shipped" or any(map(_is_command, names)):
            return ""
    elif any(map(_is_command, names)):
        return "commands import, nobody imports them"
    target = _layer_named(names[0])
    if target is None:
        is_fact = names[0].startswith("__")
        return "" if is_fact else "the package's front imports layers, never the reverse"
    if target == layer or target in LAYERS[layer]:
        return ""
    return f"it may import {', '.join(LAYERS[layer]) or 'nothing of the runtime'}"


def provider_edges(path: str, source: str) -> list[Finding]:
    """Providers (ops/) may import the hal, errors and types of the runtime, nothing behind them."""
    if not path.startswith("ops/"):
        return []
    return [
        Finding(path, line, f"a provider imports {name}; it may import hal, errors and types")
        for line, name in imported_modules(ast.parse(source), "xgr_" + _package_of(path))
        if name.startswith(ROOT + ".") and name.split(".")[1] not in ("hal", "errors", "types")
    ]


def protobuf_outside_service(path: str, source: str) -> list[Finding]:
    """Only service/ knows the wire types."""
    if not path.startswith(f"{ROOT}/") or path.startswith(f"{ROOT}/service/"):
        return []
    wire = ("google.protobuf", "grpc", f"{ROOT}.service._pb", "xgr.v1")
    return [
        Finding(path, line, f"imports {name}; wire types stay in service/")
        for line, name in imported_modules(ast.parse(source), _package_of(path))
        if any(_is_below(name, module) for module in wire)
    ]


def torch_in_torch_free(path: str, source: str) -> list[Finding]:
    """Host parts import no torch, so that they are tested and used anywhere. Annotations under TYPE_CHECKING count."""
    if not any(pattern.fullmatch(path) for pattern in TORCH_FREE):
        return []
    return [
        Finding(path, line, f"imports {name}; this file is free of torch")
        for line, name in imported_modules(ast.parse(source), _package_of(path))
        if _is_below(name, "torch")
    ]


def device_modules(path: str, source: str) -> list[Finding]:
    """torch.cuda, torch_npu and triton appear in hal and ops only, as imports and as attributes."""
    is_ours = path.startswith((f"{ROOT}/", "ops/"))
    if not is_ours or path.startswith(DEVICE_FOLDERS):
        return []
    tree = ast.parse(source)
    uses = list(imported_modules(tree, _package_of(path)))
    uses += [(n.lineno, _name(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    found = {
        (line, module)
        for line, name in uses
        for module in DEVICE_MODULES
        if _is_below(name, module)
    }
    return [
        Finding(path, line, f"uses {module}; only hal and ops know devices")
        for line, module in sorted(found)
    ]


def module_state(path: str, source: str) -> list[Finding]:
    """Mutable values bound at module level that are not constants by name, and `global` statements."""
    if not path.startswith((f"{ROOT}/", "ops/")) or path in MAY_HOLD_STATE:
        return []
    tree = ast.parse(source)
    findings = [
        Finding(path, node.lineno, f"global {', '.join(node.names)}; state belongs to an object")
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    changed = {_name(target) for target in _written_to(tree)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            name = _name(target)
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if not name or name.startswith("__") or not _is_mutable(value):
                continue
            if not name.lstrip("_").isupper() or name in changed:
                findings.append(
                    Finding(
                        path,
                        node.lineno,
                        f"{name} is mutable state of a module; give it to an object",
                    )
                )
    return findings


def _is_mutable(value: ast.expr | None) -> bool:
    literals = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    if isinstance(value, literals):
        return True
    return isinstance(value, ast.Call) and _name(value.func).split(".")[-1] in MUTABLE_CALLS


def _written_to(tree: ast.AST) -> Iterator[ast.AST]:
    """What is subscripted on the left of an assignment, deleted from, or told to change."""
    changers = (
        "append",
        "add",
        "update",
        "pop",
        "clear",
        "extend",
        "setdefault",
        "insert",
        "remove",
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in changers
        ):
            yield node.func.value


def machine_paths(path: str, source: str) -> list[Finding]:
    """Absolute paths of the machine the text was written on."""
    return [
        Finding(path, number, f"names a path of one machine: {line.strip()[:100]}")
        for number, line in enumerate(source.splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]


def unwanted_words(path: str, source: str) -> list[Finding]:
    """Work left open, tests that are switched off, hardware that is pretended."""
    words = re.compile(
        "|".join(
            (
                "TO" + "DO",
                "FIX" + "ME",
                r"pytest\.s" + r"kip\(",
                r"mark\.(s" + "kip|x" + "fail)",
                "Magic" + "Mock",
            )
        )
    )
    return [
        Finding(path, number, f"holds {found.group()!r}: {line.strip()[:80]}")
        for number, line in enumerate(source.splitlines(), 1)
        if (found := words.search(line))
    ]


@dataclass(frozen=True)
class Size:
    """Lines of a file or of a function in it."""

    name: str
    num_lines: int


def function_sizes(path: str, source: str) -> list[Size]:
    """Every function of a file with its length in lines."""
    return [
        Size(
            f"{path}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def size_table(title: str, sizes: Sequence[Size], habit: int, num_rows: int = 10) -> str:
    """The longest ones, marked where they pass the habit."""
    longest = sorted(sizes, key=lambda size: -size.num_lines)[:num_rows]
    lines = [
        f"{size.num_lines:5d} {'*' if size.num_lines > habit else ' '} {size.name}"
        for size in longest
    ]
    return "\n".join([f"{title} (habit {habit}, * = longer)", *lines])
