"""configs/reference.yaml is the documentation of the options: it must name all of them, with their defaults."""

from pathlib import Path

from xgr_runtime.config import load_config

REFERENCE = Path(__file__).parents[1] / "configs" / "reference.yaml"


def test_reference_names_every_option_with_its_default() -> None:
    reference, defaults = load_config(REFERENCE), load_config(None)
    assert [line.split("  #")[0] for line in reference.lines()] == [
        line.split("  #")[0] for line in defaults.lines()
    ]
    names = [line.split(" = ")[0] for line in defaults.lines()]
    assert [name for name in names if name not in reference.origins] == []


def test_every_option_has_a_comment() -> None:
    options = [line for line in REFERENCE.read_text().splitlines() if line.startswith("  ")]
    assert [line for line in options if "  # " not in line] == []
