"""Reading weights from safetensors files: only what is asked for, each with the shape that is expected.

A tensor nobody asked for is refused too: a bias, a scale or an adapter that is left out changes every answer
silently. Pickle files are never opened.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from xgr_runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FORMATS = {"F32", "F16", "BF16"}
_NUM_NAMED = 5


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face directory with config.json and {SINGLE_FILE}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class WeightReader:
    """The tensors of a checkpoint directory by name, converted to one device and dtype when taken."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._taken: set[str] = set()
        if (folder / SINGLE_FILE).exists():
            self._open(SINGLE_FILE)
            self._file_of = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        elif (folder / INDEX_FILE).exists():
            self._open_shards(read_json(folder / INDEX_FILE))
        else:
            raise CheckpointError(_explain_no_weights(folder))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of the tensor on the reader's device, in its dtype. Raises CheckpointError."""
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} lacks tensor {name!r}, expected with shape {list(shape)}; "
                "the checkpoint is incomplete or of another architecture than its config.json says"
            )
        file_name = self._file_of[name]
        try:
            entry = self._files[file_name].get_slice(name)
            got_shape, stored = tuple(entry.get_shape()), entry.get_dtype()
            if got_shape != shape:
                raise CheckpointError(
                    f"tensor {name!r} in {self.folder / file_name} must have shape {list(shape)} "
                    f"according to config.json, got {list(got_shape)}"
                )
            if stored not in _FORMATS:
                raise CheckpointError(
                    f"tensor {name!r} in {self.folder / file_name} must be stored as one of "
                    f"{', '.join(sorted(_FORMATS))}, got {stored}; quantised checkpoints are not supported"
                )
            tensor: torch.Tensor = self._files[file_name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"cannot read tensor {name!r} of {self.folder / file_name}: {error}"
            ) from error
        self._taken.add(name)
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def discard(self, suffix: str) -> None:
        """Accept tensors with this suffix without reading them."""
        self._taken.update(name for name in self._file_of if name.endswith(suffix))

    def finish(self) -> None:
        """Raise CheckpointError when the checkpoint holds tensors that nobody took."""
        unknown = sorted(self._file_of.keys() - self._taken)
        if unknown:
            more = "" if len(unknown) <= _NUM_NAMED else f" and {len(unknown) - _NUM_NAMED} more"
            raise CheckpointError(
                f"{self.folder} holds tensors that the architecture in its config.json does not use: "
                f"{', '.join(unknown[:_NUM_NAMED])}{more}; leaving them out would change the answers, "
                "so fix config.json or export the checkpoint without them"
            )

    def _open(self, file_name: str) -> None:
        path = self.folder / file_name
        try:
            self._files[file_name] = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.folder / INDEX_FILE} names {file_name!r}, which does not exist in {self.folder}"
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file (truncated, damaged or another format): {error}"
            ) from error

    def _open_shards(self, index: Mapping[str, Any]) -> None:
        path = self.folder / INDEX_FILE
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} must hold a 'weight_map' from tensor names to files")
        for file_name in sorted({str(file_name) for file_name in weight_map.values()}):
            if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path} names {file_name!r}; expected the plain name of a .safetensors file in the same folder"
                )
            self._open(file_name)
            held = set(self._files[file_name].keys())
            lost = sorted(
                name for name, f in weight_map.items() if f == file_name and name not in held
            )
            if lost:
                raise CheckpointError(
                    f"{path} places tensor {lost[0]!r} in {file_name!r}, which does not hold it"
                )
            self._file_of.update(dict.fromkeys(held, file_name))


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
