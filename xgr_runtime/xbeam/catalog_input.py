"""Reading what others wrote: regular files only, JSON without repeated names, values shown in messages at a bounded length.

A named pipe or a terminal as input would hang a command or a server for ever, so they are refused before a byte is
read. A message must be possible for every value: Python itself refuses to print numbers of thousands of digits and
values nested deep enough, and a message that fails hides what it was about.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from reprlib import Repr
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from xgr_runtime.errors import CatalogError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

_MAX_SHOWN_BITS = 256
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


class _Shown(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = self.maxother = 120

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MAX_SHOWN_BITS else f"a whole number of {bits} bits"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """`repr` of any value, cut in length and depth; never raises for a value that JSON or a list can hold."""
    return _SHOWN.repr(value)


def as_array(what: str, values: ArrayLike) -> NDArray[Any]:
    """`np.asarray`; raises CatalogError naming `what` for rows of different lengths or a nesting numpy does not take."""
    try:
        return np.asarray(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise CatalogError(f"{what}: an array of values expected, {error}") from error


def kind_of(mode: int) -> str:
    """What a file is, from its st_mode: "a directory", "a pipe", ...; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file")


def open_regular(path: str | Path, action: str) -> BinaryIO:
    """Opens a regular file for reading without waiting for anybody.

    Args:
        path: the file; links are followed.
        action: what to say could not be done, such as "read".

    Raises:
        CatalogError: the file is missing, unreadable, or no regular file.
    """
    try:
        # Without O_NONBLOCK opening a pipe waits for a writer; reading a regular file is the same with it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise CatalogError(f"cannot {action} {path}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL or a lone surrogate: no such path can exist
        raise CatalogError(f"cannot {action} {shown(str(path))}: {error}") from error
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind:
        os.close(descriptor)
        raise CatalogError(f"cannot {action} {path}: a regular file is needed, this is {kind}")
    return open(descriptor, "rb")


def refuse_overwrite(output: str | Path, sources: dict[str, str | Path]) -> None:
    """Refuses a destination that is one of the sources, under any name, or exists and is no regular file.

    Args:
        output: the file to be written; it need not exist.
        sources: files to be read, by what they are called in the message.

    Raises:
        CatalogError: writing would destroy an input or replace a device, pipe or folder.
    """
    try:
        kind = kind_of(os.stat(output).st_mode)
    except OSError:
        return  # nothing is there, or writing will say why it cannot be
    except ValueError as error:
        raise CatalogError(f"cannot write the catalogue {shown(str(output))}: {error}") from error
    if kind:
        raise CatalogError(
            f"cannot write the catalogue {output}: it is {kind}; name a file that may be replaced"
        )
    for what, source in sources.items():
        try:
            is_same = os.path.samefile(output, source)
        except (OSError, ValueError):
            continue  # reading the source will say why it cannot be
        if is_same:
            raise CatalogError(
                f"cannot write the catalogue {output}: it is the same file as {what} {source}; "
                "name another file"
            )


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {shown(name)} is given twice in one object")
    return names


_DECODER = json.JSONDecoder(object_pairs_hook=_unrepeated)
_PLAIN_DECODER = json.JSONDecoder()
_LINE_ENDS = ("\n", "", "\r\n")


def parse_json(content: bytes) -> Any:
    """One JSON value in UTF-8.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deep, a number of too many digits, or a name given twice in one
            object (of which Python alone would keep the last).
    """
    if content.startswith(codecs.BOM_UTF8):
        raise ValueError("it starts with a byte order mark; save it as UTF-8 without one")
    try:
        return _DECODER.decode(content.decode())
    except RecursionError as error:
        raise ValueError("the value is nested too deep") from error


def parse_flat_object(line: bytes) -> Any:
    """As `parse_json`, in half of the time for an object of plain values; for files of a million lines.

    Names given twice are found by counting: where no colon has blank space before it, every member has one colon behind a
    quotation mark. As many of those as names that were kept: none was dropped. Anything else is read again with care.

    Raises:
        ValueError: as `parse_json`.
    """
    try:
        text = line.decode()
        item, end = _PLAIN_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return parse_json(line)  # which says what is wrong
    is_whole = text[end:] in _LINE_ENDS and type(item) is dict and text.count('":') == len(item)
    if is_whole and not (" :" in text or "\t:" in text or "\n:" in text or "\r:" in text):
        return item
    return parse_json(line)
