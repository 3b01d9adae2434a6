"""Record the wire of a release: proto/released/v1.binpb, against which `buf breaking` compares every later state.

Run once per release, after the version is set. It refuses a state that breaks what was released before: that needs a new
package (xgr.v2) beside the old one. The image is a serialised FileDescriptorSet with buf's own additions, without comments.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "proto" / "released" / "v1.binpb"
BUF = Path(sys.executable).with_name("buf")


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    problems = lint(ROOT) + (breaking(ROOT) if IMAGE.exists() else [])
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    IMAGE.parent.mkdir(exist_ok=True)
    before = IMAGE.read_bytes() if IMAGE.exists() else b""
    image = build(ROOT)
    IMAGE.write_bytes(image)
    changed = "as before" if image == before else "changed"
    print(f"{IMAGE.relative_to(ROOT)}: {len(image)} bytes, {changed}")
    return 0


def lint(workspace: Path) -> list[str]:
    """What `buf lint` finds in a folder with buf.yaml and proto/, a line each."""
    return _problems("lint", str(workspace))


def breaking(workspace: Path) -> list[str]:
    """Where the protos of a folder break what was released, a line each."""
    return _problems("breaking", str(workspace), "--against", str(IMAGE))


def build(workspace: Path) -> bytes:
    """The image of a folder's protos."""
    command = ("build", str(workspace), "--exclude-source-info", "-o", "-#format=binpb")
    done = _buf(*command)
    if done.returncode:
        sys.exit(f"buf build failed: {done.stderr.decode()}")
    return done.stdout


def _problems(*command: str) -> list[str]:
    done = _buf(*command)
    found = (done.stdout + done.stderr).decode().splitlines()
    if done.returncode and not found:
        found = [f"buf {command[0]} ended with exit code {done.returncode}"]
    return found


def _buf(*command: str) -> "subprocess.CompletedProcess[bytes]":
    with tempfile.TemporaryDirectory(prefix="xgr-buf-") as cache:
        environment = {**os.environ, "BUF_CACHE_DIR": cache}
        return subprocess.run([BUF, *command], capture_output=True, check=False, env=environment)


if __name__ == "__main__":
    sys.exit(main())
