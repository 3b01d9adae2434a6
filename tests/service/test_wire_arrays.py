"""Array codecs against `struct`, and every fault of a list field."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service import wire_arrays
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)


def violations(found: wire_arrays.Violations) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        found.raise_if_any()
    return list(caught.value.violations)


@given(st.lists(INT64, max_size=20))
def test_int64_bytes_are_little_endian(values: list[int]) -> None:
    data = wire_arrays.encode_int64(values)
    assert data == struct.pack(f"<{len(values)}q", *values)
    decoded = wire_arrays.decode_int64(data)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == values


@given(st.lists(st.tuples(UINT32, UINT32, UINT32), max_size=8))
def test_uint32_bytes_are_rows_of_levels(rows: list[tuple[int, int, int]]) -> None:
    data = wire_arrays.encode_uint32(np.array(rows, dtype=np.uint32).reshape(-1, 3))
    assert data == struct.pack(f"<{3 * len(rows)}I", *(code for row in rows for code in row))
    decoded = wire_arrays.decode_uint32(data, 3)
    assert decoded.shape == (len(rows), 3)
    assert [tuple(row) for row in decoded.tolist()] == rows


@given(st.lists(st.floats(width=32), max_size=20))
def test_float32_bytes_keep_every_bit(values: list[float]) -> None:
    data = wire_arrays.encode_float32(np.array(values, dtype=np.float32))
    assert data == struct.pack(f"<{len(values)}f", *values)
    assert wire_arrays.decode_float32(data).tobytes() == np.array(values, np.float32).tobytes()


def test_encoding_does_not_depend_on_layout_or_byte_order() -> None:
    rows = np.arange(6, dtype=">u4").reshape(2, 3)
    assert wire_arrays.encode_uint32(rows.T.copy(order="F")) == struct.pack("<6I", 0, 3, 1, 4, 2, 5)


@given(st.lists(INT64, max_size=20), st.booleans())
def test_read_int64_accepts_both_forms(values: list[int], as_bytes: bool) -> None:
    message = pb.Int64Values()
    if as_bytes:
        message.values_le = struct.pack(f"<{len(values)}q", *values)
    else:
        message.values.extend(values)
    found = wire_arrays.Violations()
    assert wire_arrays.read_int64(message, "f", "max_x", 20, found).tolist() == values
    found.raise_if_any()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            pb.Int64Values(values=[1], values_le=bytes(8)),
            ("f", "must be given as values or as values_le, got both"),
        ),
        (
            pb.Int64Values(values_le=bytes(9)),
            ("f.values_le", "must be int64 little-endian, a multiple of 8 bytes, got 9 bytes"),
        ),
        (
            pb.Int64Values(values=[1, 2, 3]),
            ("f", "must hold at most 2 entries, got 3; raise limits.max_x to allow"),
        ),
        (
            pb.Int64Values(values_le=bytes(24)),
            ("f", "must hold at most 2 entries, got 3; raise limits.max_x to allow"),
        ),
    ],
)
def test_read_int64_names_the_fault(message: pb.Int64Values, expected: tuple[str, str]) -> None:
    found = wire_arrays.Violations()
    assert wire_arrays.read_int64(message, "f", "max_x", 2, found).shape == (0,)
    assert violations(found) == [expected]


@given(st.lists(st.tuples(UINT32, UINT32), max_size=8), st.booleans())
def test_read_sids_accepts_both_forms(rows: list[tuple[int, int]], as_bytes: bool) -> None:
    flat = [code for row in rows for code in row]
    message = pb.SidValues(num_levels=2)
    if as_bytes:
        message.values_le = struct.pack(f"<{len(flat)}I", *flat)
    else:
        message.values.extend(flat)
    found = wire_arrays.Violations()
    sids = wire_arrays.read_sids(message, "f", "max_x", 8, found)
    found.raise_if_any()
    assert sids.dtype == np.uint32
    assert sids.shape == (len(rows), 2)
    assert [tuple(row) for row in sids.tolist()] == rows


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            pb.SidValues(num_levels=1, values=[1], values_le=bytes(4)),
            ("f", "must be given as values or as values_le, got both"),
        ),
        (
            pb.SidValues(values=[1]),
            ("f.num_levels", "must be the catalogue's number of levels, 1 to 8, got 0"),
        ),
        (
            pb.SidValues(num_levels=4_000_000_000),
            ("f.num_levels", "must be the catalogue's number of levels, 1 to 8, got 4000000000"),
        ),
        (
            pb.SidValues(num_levels=3, values_le=bytes(16)),
            (
                "f.values_le",
                "must be uint32 little-endian [n, 3], a multiple of 12 bytes, got 16 bytes",
            ),
        ),
        (
            pb.SidValues(num_levels=3, values=[1, 2, 3, 4]),
            ("f.values", "must be [n, 3] row after row, a multiple of 3 codes, got 4 codes"),
        ),
        (
            pb.SidValues(num_levels=2, values=range(6)),
            ("f", "must hold at most 2 entries, got 3; raise limits.max_x to allow"),
        ),
        (
            pb.SidValues(num_levels=2, values_le=bytes(24)),
            ("f", "must hold at most 2 entries, got 3; raise limits.max_x to allow"),
        ),
    ],
)
def test_read_sids_names_the_fault(message: pb.SidValues, expected: tuple[str, str]) -> None:
    found = wire_arrays.Violations()
    assert len(wire_arrays.read_sids(message, "f", "max_x", 2, found)) == 0
    assert violations(found) == [expected]


def test_an_empty_list_of_sids_has_levels_too() -> None:
    found = wire_arrays.Violations()
    assert wire_arrays.read_sids(pb.SidValues(num_levels=3), "f", "max_x", 2, found).shape == (0, 3)
    found.raise_if_any()
    wire_arrays.read_sids(pb.SidValues(), "f", "max_x", 2, found)
    assert [field for field, _ in violations(found)] == ["f.num_levels"]
