"""Arrays on the wire, and the list of what is wrong with a request.

Checks do not raise one by one: a caller who fixes a request wants every fault at once. Decoders therefore note faults in a
`Violations` list and return an empty array, and the caller raises once at the end. Lengths are compared with the limits before
any array is built, so that a huge field costs no memory beyond the message itself.
"""

import numpy as np
import numpy.typing as npt

from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.types import Float32Array, Int64Array, Uint32Array

MAX_LEVELS = 8


class Violations:
    """(field path, description) pairs found in one request, in the order they were found."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def add(self, field: str, text: str) -> None:
        """Note one fault."""
        self._found.append((field, text))

    def raise_if_any(self) -> None:
        """Raise InvalidRequest when anything was noted."""
        if self._found:
            raise InvalidRequest(self._found)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can carry a string: JSON and command lines can hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_count(count: int, field: str, limit_name: str, limit: int, found: Violations) -> bool:
    """Note a violation and return False when a list is longer than the configuration allows."""
    if count <= limit:
        return True
    found.add(
        field, f"must hold at most {limit} entries, got {count}; raise limits.{limit_name} to allow"
    )
    return False


def encode_int64(values: npt.ArrayLike) -> bytes:
    """int64 little-endian, flat."""
    return np.asarray(values, dtype="<i8").tobytes()


def encode_uint32(values: npt.ArrayLike) -> bytes:
    """uint32 little-endian, row after row."""
    return np.asarray(values, dtype="<u4").tobytes()


def encode_float32(values: npt.ArrayLike) -> bytes:
    """float32 little-endian, row after row."""
    return np.asarray(values, dtype="<f4").tobytes()


def decode_int64(data: bytes) -> Int64Array:
    """int64 [n]; the length must be a multiple of 8."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)


def decode_uint32(data: bytes, num_levels: int) -> Uint32Array:
    """uint32 [n, num_levels]; the length must be a multiple of 4 * num_levels."""
    flat = np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
    return flat.reshape(-1 if num_levels else 0, num_levels)


def decode_float32(data: bytes) -> Float32Array:
    """float32 [n]; the length must be a multiple of 4."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def read_int64(
    values: pb.Int64Values, field: str, limit_name: str, limit: int, found: Violations
) -> Int64Array:
    """The list of an Int64Values field, int64 [n]."""
    empty = np.zeros(0, dtype=np.int64)
    if values.values and values.values_le:
        found.add(field, "must be given as values or as values_le, got both")
        return empty
    if len(values.values_le) % 8:
        found.add(
            f"{field}.values_le",
            f"must be int64 little-endian, a multiple of 8 bytes, got {len(values.values_le)} bytes",
        )
        return empty
    count = len(values.values) + len(values.values_le) // 8
    if not check_count(count, field, limit_name, limit, found):
        return empty
    if values.values:
        return np.fromiter(values.values, dtype=np.int64, count=count)
    return decode_int64(values.values_le)


def read_sids(
    sids: pb.SidValues, field: str, limit_name: str, limit: int, found: Violations
) -> Uint32Array:
    """The list of a SidValues field, uint32 [n, num_levels]."""
    num_levels = sids.num_levels
    empty = np.zeros((0, num_levels if num_levels <= MAX_LEVELS else 0), dtype=np.uint32)
    if sids.values and sids.values_le:
        found.add(field, "must be given as values or as values_le, got both")
        return empty
    if not 1 <= num_levels <= MAX_LEVELS:
        found.add(
            f"{field}.num_levels",
            f"must be the catalogue's number of levels, 1 to {MAX_LEVELS}, got {num_levels}",
        )
        return empty
    if len(sids.values_le) % (4 * num_levels):
        found.add(
            f"{field}.values_le",
            f"must be uint32 little-endian [n, {num_levels}], a multiple of {4 * num_levels} bytes, "
            f"got {len(sids.values_le)} bytes",
        )
        return empty
    if len(sids.values) % num_levels:
        found.add(
            f"{field}.values",
            f"must be [n, {num_levels}] row after row, a multiple of {num_levels} codes, "
            f"got {len(sids.values)} codes",
        )
        return empty
    count = (len(sids.values) + len(sids.values_le) // 4) // num_levels
    if not check_count(count, field, limit_name, limit, found):
        return empty
    if sids.values:
        flat = np.fromiter(sids.values, dtype=np.uint32, count=count * num_levels)
        return flat.reshape(count, num_levels)
    return decode_uint32(sids.values_le, num_levels)
