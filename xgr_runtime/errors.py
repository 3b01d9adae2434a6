"""Errors a user of the runtime can meet. Everything else that is raised is a defect of the runtime."""

import reprlib
import traceback
from collections.abc import Sequence


class XgrError(Exception):
    """Base of all errors that the runtime raises on purpose."""


class ConfigError(XgrError, ValueError):
    """The configuration names something unknown, of the wrong type, or out of range."""


class CatalogError(XgrError, ValueError):
    """A catalogue source or compiled catalogue file is not acceptable."""


class CheckpointError(XgrError, ValueError):
    """A model directory is missing, incomplete, unsupported, or does not fit the catalogue."""


class DeviceError(XgrError, RuntimeError):
    """A device was asked for that is absent, it refused an operation, or it or its host has no memory for one."""


class DeviceLost(DeviceError):
    """The device fails whatever it is given, from now on; the engine ends."""


class OpUnavailable(XgrError, RuntimeError):
    """No provider accepts an op on this device for these shapes; the message lists every reason."""


class Overloaded(XgrError, RuntimeError):
    """The queue is full; the request was not accepted and may be sent again later."""


class DeadlineExceeded(XgrError, TimeoutError):
    """The request's deadline passed before its answer was ready."""


class EngineClosed(XgrError, RuntimeError):
    """The engine is draining or closed and accepts no further requests."""


class NotFound(XgrError, LookupError):
    """A named catalogue or version is not loaded; the message lists the known ones."""


class InvalidRequest(XgrError, ValueError):
    """A request breaks the contract. `violations` lists (field path, description) pairs."""

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{field}: {text}" for field, text in self.violations))


def release_frames(error: BaseException) -> None:
    """Empty the frames that an error and its causes went through; their lines stay in its traceback.

    For errors that are kept: what a batch had on the device when it failed would stay there until the collector of cycles comes by.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print integers of thousands of digits."""
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


def shown(value: object) -> str:
    """A value from outside as an error message quotes it: one line, shortened, whatever its size and nesting."""
    return _SHOWN.repr(value)


def printable(text: str, max_characters: int | None = None) -> str:
    """Text from outside without quotes around it: control characters escaped, and cut when longer than that."""
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[: max_characters - 3]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_SHOWN = _Shown()
