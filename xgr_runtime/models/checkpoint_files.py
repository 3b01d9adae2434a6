"""The files of a model directory: config.json and the safetensors index as strict JSON, and which files hold the weights.

The index, where there is one, is the authority: its files are the checkpoint, and each tensor is where it says. Other
safetensors files of the folder (exports of another format, say) are never opened. Only a model.safetensors that the
index does not name is refused, because other programs would load that one instead.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgr_runtime.errors import CheckpointError, shown
from xgr_runtime.files import open_regular, parse_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_DIGITS = 40
_MAX_NAME_BYTES = 255  # what file systems allow
_MAX_JSON_BYTES = 1 << 26  # an index of a hundred thousand tensors takes a tenth of it


@dataclass(frozen=True)
class WeightFiles:
    """names: the safetensors files, sorted. file_of: the file of every tensor, None where no index says it."""

    names: tuple[str, ...]
    file_of: Mapping[str, str] | None


def find_weight_files(folder: Path) -> WeightFiles:
    """The safetensors files that are the checkpoint in `folder`. Raises CheckpointError."""
    has_single = (folder / SINGLE_FILE).exists()
    if not (folder / INDEX_FILE).exists():
        if not has_single:
            raise CheckpointError(_explain_no_weights(folder))
        return WeightFiles((SINGLE_FILE,), None)
    file_of = _weight_map(folder / INDEX_FILE)
    names = tuple(sorted(set(file_of.values())))
    if has_single and SINGLE_FILE not in names:
        raise CheckpointError(
            f"{folder} holds {SINGLE_FILE} and also {INDEX_FILE}, which does not name it; remove the one that is stale"
        )
    return WeightFiles(names, file_of)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a name given twice is refused. Raises CheckpointError."""
    missing = f"{path} does not exist; expected a Hugging Face directory with {CONFIG_FILE} and {SINGLE_FILE}"
    try:
        with open_regular(path, "read", CheckpointError, missing=missing) as file:
            content = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path} must have at most {_MAX_JSON_BYTES} bytes of JSON")
    try:
        value = parse_json(content, parse_int=_integer)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _integer(text: str) -> int | str:
    """What is too long for any count stays text, so that it is refused by its key, and only if that key is read."""
    return int(text) if len(text) <= _MAX_DIGITS else text


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} must hold a 'weight_map' from tensor names to files, got {shown(weight_map)}"
        )
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            raise CheckpointError(
                f"{path} names {shown(name)} for tensor {shown(tensor)}; "
                "expected the plain name of a .safetensors file in the same folder"
            )
    return weight_map


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and Path(name).name == name
        and name.endswith(".safetensors")
        and name.isprintable()
        and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    )


def _explain_no_weights(folder: Path) -> str:
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    hint = (
        f"; it holds {', '.join(pickled)}, but pickle files are never loaded: convert them to safetensors"
        if pickled
        else ""
    )
    return f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}"
