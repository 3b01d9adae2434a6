"""Write the README's section of GPU figures, and its plot, from the results under tools/results.

Everything between the two marks of README.md is written anew. With --check nothing is written: the exit code is 1 where
README or plot are not what the committed results give, or the results are not what they have to be.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.results import FOLDER, Results, load_results, why_wrong  # noqa: E402
from tools._bench.results_plot import svg  # noqa: E402
from tools._bench.results_text import PLOT, section  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

README = ROOT / "README.md"
BEGIN = "<!-- written by tools/plot_results.py -->"
END = "<!-- end of what tools/plot_results.py writes -->"


def with_section(readme: str, text: str) -> str:
    """The README with that text between its marks; raises SystemExit where they are not there once each, in order."""
    if BEGIN in text or END in text:
        raise SystemExit("the text holds one of the marks that it stands between")
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise SystemExit(f"README.md needs the lines {BEGIN} and {END} once each")
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def stale(readme: Path, folder: Path, results: Results | None) -> list[str]:
    """The files that are not what the results give."""
    text, plot = readme.read_text("utf-8"), folder / PLOT
    found = [] if with_section(text, section(results)) == text else [readme.name]
    drawn = plot.read_text("utf-8") if plot.exists() else None
    return [*found, *([PLOT] if drawn != (None if results is None else svg(results)) else [])]


def main(
    arguments: Sequence[str] | None = None, readme: Path = README, folder: Path = FOLDER
) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    results = load_results(folder)
    wrong = [] if results is None else why_wrong(results)
    for why in wrong:
        print(why, file=sys.stderr)
    if wrong:
        return 1
    if args.check:
        for name in (names := stale(readme, folder, results)):
            print(f"{name} is stale: run python tools/plot_results.py", file=sys.stderr)
        return 1 if names else 0
    written = {readme: with_section(readme.read_text("utf-8"), section(results))}
    if results is not None:
        written[folder / PLOT] = svg(results)
    for path, text in written.items():  # all of them are known before one is written
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, "utf-8")
        os.replace(beside, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
