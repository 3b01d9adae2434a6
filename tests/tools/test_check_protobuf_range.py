"""Which versions the ends of the range are; serving them needs the network and runs in continuous integration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from tools import check_protobuf_range as check
from tools._packaging import distributions, environments

if TYPE_CHECKING:
    from pathlib import Path


def test_the_lowest_end_has_every_requirement_at_its_lowest(tmp_path: Path) -> None:
    requirements = distributions.requirements(distributions.build_wheel(tmp_path))
    pins = {pin.name: pin for pin in map(Requirement, check.lowest(requirements))}
    assert set(pins) == {r.name for r in requirements} - set(check.GIVEN) | {"grpcio-status"}
    for requirement in requirements:
        if requirement.name not in check.GIVEN:
            (pin,) = pins[requirement.name].specifier
            assert pin.operator == "=="
            assert pin.version in requirement.specifier
            assert not requirement.specifier.contains("0.0.1")


def test_the_ends_are_apart() -> None:
    newest = {pin.name: pin for pin in map(Requirement, check.newest())}
    (version,) = newest["protobuf"].specifier
    assert Version(version.version).major > 5


def test_torch_brings_what_it_needs_and_nothing_of_grpc() -> None:
    names = {path.name for path in environments.entries_of("torch", "numpy")}
    assert {"torch", "numpy", "sympy", "mpmath"} <= names
    assert not [name for name in names if name.startswith(("grpc", "google", "xgr"))]
