"""Build the wheel and the sdist into dist/ (what `make dist` runs); needs no network.

From a copy of what git has: a build in the checkout leaves a build/ folder, and the next wheel takes deleted modules from there.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._packaging import distributions  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    out = parser.parse_args(argv).out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xgr-dist-") as folder:
        distributions.copy_sources(Path(folder))
        for kind in ("sdist", "wheel"):
            print(distributions.build(Path(folder), kind, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
