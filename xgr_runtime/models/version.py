"""The version of a checkpoint that nobody named: a digest over its configuration and weights."""

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 22


def checkpoint_digest(path: str | Path) -> str:
    """12 hexadecimal digits over config.json and every safetensors file of a model directory, names included."""
    folder = Path(path)
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()[:12]
