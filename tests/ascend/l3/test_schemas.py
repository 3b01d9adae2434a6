"""The comparison of the stand-ins' schemas with the vendor's."""

from __future__ import annotations

import pytest

from tools._ladder.l3_schemas import schema_failures, stand_in_schemas

VENDOR = {
    "npu::npu_swiglu": "npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu::npu_update_": "npu::npu_update_(Tensor(a!) input, float eps=1.0000000000000001e-05) -> Tensor(a!)",
}


def test_equal_schemas_may_be_written_differently() -> None:
    ours = {
        "npu_swiglu": "(Tensor input, int dim=-1)->Tensor",
        "npu_update_": "(Tensor(a!) input, float eps=1e-05) -> Tensor(a!)",
    }
    assert schema_failures(ours, VENDOR, "stand-ins") == []


@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor input, int dim=1) -> Tensor",
        "(Tensor x, int dim=-1) -> Tensor",
        "(Tensor input, *, int dim=-1) -> Tensor",
        "(Tensor(a!) input, int dim=-1) -> Tensor",
        "(Tensor input, int dim=-1) -> (Tensor, Tensor)",
    ],
)
def test_a_difference_is_reported_with_both(schema: str) -> None:
    (failure,) = schema_failures({"npu_swiglu": schema}, VENDOR, "stand-ins")
    assert "npu::npu_swiglu differs" in failure
    assert VENDOR["npu::npu_swiglu"] in failure


def test_an_op_that_the_vendor_lacks_is_reported() -> None:
    (failure,) = schema_failures({"npu_other": "(Tensor input) -> Tensor"}, VENDOR, "stand-ins")
    assert failure == "stand-ins: the vendor has no op npu::npu_other"


def test_the_stand_ins_of_the_tests_have_tables() -> None:
    tables = stand_in_schemas()
    names = [name for table in tables.values() for name in table]
    assert len(names) == len(set(names)) >= 7
    assert all(schema.startswith("(") for table in tables.values() for schema in table.values())
