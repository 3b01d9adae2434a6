"""Files that others wrote: regular ones only, and JSON that means one thing.

A named pipe or a terminal as input would hang a command or a server for ever, so it is refused before a byte is read. Of a
name given twice in one object Python would keep the last value and drop the first without a word.
"""

import codecs
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from xgr_runtime.errors import XgrError, shown

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def kind_of(mode: int) -> str:
    """What a file is, from its st_mode: "a directory", "a pipe", ...; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file")


def open_regular(
    path: str | Path, action: str, error_class: type[XgrError], *, missing: str = ""
) -> BinaryIO:
    """Open a regular file for reading without waiting for anybody.

    Args:
        path: the file; links are followed.
        action: what to say could not be done, such as "read".
        error_class: what is raised when the file is missing, unreadable, or no regular file.
        missing: the whole message for a file that does not exist, where the system's words are not enough.
    """
    try:
        # Without O_NONBLOCK opening a pipe waits for a writer; reading a regular file is the same with it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        said = missing if is_missing and missing else f"cannot {action} {path}: {_reason(error)}"
        raise error_class(said) from error
    except ValueError as error:  # a NUL or a lone surrogate: no such path can exist
        raise error_class(f"cannot {action} {shown(str(path))}: {error}") from error
    kind = kind_of(os.fstat(descriptor).st_mode)
    if kind:
        os.close(descriptor)
        raise error_class(f"cannot {action} {path}: a regular file is needed, this is {kind}")
    return open(descriptor, "rb")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


class _RepeatedName(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RepeatedName(name)
            seen.add(name)
    return names


_DECODER = json.JSONDecoder(object_pairs_hook=_unrepeated)


def parse_json(content: bytes, *, parse_int: Callable[[str], Any] | None = None) -> Any:
    """One JSON value in UTF-8; `parse_int` reads its integers where that is not `int`.

    Raises ValueError for everything else. Its message is what to say of the content: "is not JSON: ...", "gives 'a' twice".
    """
    if content.startswith(codecs.BOM_UTF8):
        raise ValueError("starts with a byte order mark; save it as UTF-8 without one")
    decoder = _DECODER
    if parse_int is not None:
        decoder = json.JSONDecoder(object_pairs_hook=_unrepeated, parse_int=parse_int)
    try:
        return decoder.decode(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    except _RepeatedName as error:
        raise ValueError(f"gives {shown(error.name)} twice in one object") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise ValueError("has a number of too many digits") from error
