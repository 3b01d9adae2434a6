"""YAML as configurations use it: plain mappings, lists and scalars, each written once.

What YAML offers beyond that is refused where it stands, because it hides what a value is (tags, merge keys, numbers of
base 8 or 60), can be endless (aliases), or is settled silently (a key given twice keeps its last value). Dates stay
text.
Every error is one line with the source and, where YAML knows it, the line and column.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from xgr_runtime.errors import ConfigError, shown

# Many times what the longest configuration needs; a file of any size would take all memory.
MAX_FILE_BYTES = 2**20
MAX_DEPTH = 16
# The line of an option in its file, by the keys that lead to it.
Lines = Mapping[tuple[str, ...], int]
_NO_IMPLICIT = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "merge", "value")}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,39}|0x[0-9a-fA-F]{1,32})")
_FLOAT = re.compile(r"[^:]{1,400}")


def read_yaml_file(path: str | Path) -> tuple[dict[str, Any], Lines]:
    """The mapping of options in a file, {} for an empty one, and the line of each. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:  # also a pipe of the shell: `--config <(...)`
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except ValueError as error:  # a path that no system call takes
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"cannot read configuration {path}: a file of at most {MAX_FILE_BYTES} bytes is needed, this is larger"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    tree, lines = _parse(text, str(path))
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of options, got {type(tree).__name__}")
    return tree, lines


def parse_yaml(text: str, source: str) -> Any:
    """The value of one YAML document; `source` names it in errors. Raises ConfigError."""
    return _parse(text, source)[0]


def _parse(text: str, source: str) -> tuple[Any, Lines]:
    try:
        loader = _StrictLoader(text)
        try:
            node: Any = loader.get_single_node()
            if node is None:
                return None, {}
            return loader.construct_document(node), dict(_lines(node, ()))
        finally:
            loader.dispose()
    except _RefusedError as error:
        raise ConfigError(f"{source}{_place(error.problem_mark)}: {error.problem}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = f"{error.context or ''} {error.problem or ''}"
        problem = " ".join(told.split())
        raise ConfigError(f"{source}{_place(mark)} is not YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{source} is not YAML: character {error.position + 1} is U+{error.character:04X}, {error.reason}"
        ) from error


def _lines(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key of the mappings in a node, by the keys above it and its own."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        own = (*path, key.value)
        yield own, key.start_mark.line + 1
        yield from _lines(value, own)


class _RefusedError(yaml.MarkedYAMLError):
    """Well-formed YAML that a configuration must not use."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _StrictLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NO_IMPLICIT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(
                f"alias *{event.anchor} is not supported; write the value out", event.start_mark
            )
        if getattr(event, "tag", None) is not None:
            raise _RefusedError(
                f"tag {event.tag!r} is not supported; write the plain value", event.start_mark
            )
        if self._depth == MAX_DEPTH:
            raise _RefusedError(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _RefusedError("a key must be a name, got a list or mapping", key.start_mark)
            if key.value in seen:
                raise _RefusedError(f"option {shown(key.value)} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_plain_int(self, node: yaml.ScalarNode) -> int:
        if not _INT.fullmatch(node.value):
            raise _RefusedError(
                f"a number must be decimal, without leading zeros, and of at most 40 digits, got {shown(node.value)} "
                "(quote it where text is meant)",
                node.start_mark,
            )
        return int(self.construct_yaml_int(node))

    def construct_plain_float(self, node: yaml.ScalarNode) -> float:
        if not _FLOAT.fullmatch(node.value):
            raise _RefusedError(
                f"a number must be decimal, of at most 400 digits, got {shown(node.value)} "
                "(quote it where text is meant)",
                node.start_mark,
            )
        return float(self.construct_yaml_float(node))


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_plain_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_plain_float)


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
