"""What the wheel check makes of pip's answers; pip itself needs the network and runs in continuous integration."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from tools import check_aarch64_wheels as check


@pytest.mark.parametrize(
    ("answer", "cell"),
    [
        (
            "numpy-2.4.6-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl",
            "2.4.6 manylinux_2_27_aarch64",
        ),
        ("protobuf-7.36.2-cp310-abi3-manylinux2014_aarch64.whl", "7.36.2 manylinux2014_aarch64"),
        ("a_b-1.0-2-py3-none-any.whl", "1.0 any"),
        ("ERROR: No matching distribution found for x", "MISSING"),
        (check.NOT_NEEDED, "not needed"),
    ],
)
def test_a_cell_of_the_table(answer: str, cell: str) -> None:
    assert check.brief(answer) == cell


def test_a_dependency_of_another_python_is_not_asked_for() -> None:
    requirement = Requirement('tomli>=2; python_version < "3.11"')
    assert check.wheel_for(requirement, "3.12") == check.NOT_NEEDED


def test_a_missing_wheel_is_told_with_pips_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip with no index to ask."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    answer = check.wheel_for(Requirement("numpy>=1.26"), "3.11")
    assert check.brief(answer) == "MISSING"
    assert "numpy" in answer
