"""The version of a checkpoint that nobody named: a digest over its configuration and weights."""

import hashlib
from pathlib import Path

from xgr_runtime.errors import CheckpointError
from xgr_runtime.files import open_regular
from xgr_runtime.models.checkpoint_files import CONFIG_FILE, find_weight_files

_CHUNK_BYTES = 1 << 22


def checkpoint_digest(path: str | Path) -> str:
    """12 hexadecimal digits over config.json and the safetensors files that are loaded, names included.

    Raises CheckpointError.
    """
    folder = Path(path)
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, *find_weight_files(folder).names):
        digest.update(name.encode())
        try:
            with open_regular(folder / name, "read", CheckpointError) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    return digest.hexdigest()[:12]
