"""Reading weights from safetensors files: only what is asked for, each with the shape that is expected.

A tensor nobody asked for is refused too: a bias, a scale or an adapter that is left out changes every answer
silently. So is one with NaN or infinity, which would fail every search later, and one that two files hold. Pickle files
are never opened.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from xgr_runtime.errors import CheckpointError, printable, shown
from xgr_runtime.files import open_regular
from xgr_runtime.hal.memory import room_for
from xgr_runtime.models.checkpoint_files import INDEX_FILE, find_weight_files

_FORMATS = {"F32", "F16", "BF16"}
_NUM_NAMED = 5
_MAX_REASON = 200  # characters of what the safetensors library says
_PIECE = 1 << 18  # elements


class WeightReader:
    """The tensors of a checkpoint directory by name, converted to one device and dtype when taken."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._taken: set[str] = set()
        found = find_weight_files(folder)
        for file_name in found.names:
            self._open(file_name)
        if found.file_of is not None:
            self._check_index(found.file_of)

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
                f"cannot read tensor {name!r} of {self.folder / file_name}: {printable(str(error), _MAX_REASON)}"
            ) from error
        self._taken.add(name)
        return self._place(name, tensor)

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
                f"{', '.join(printable(name, _MAX_REASON) for name in unknown[:_NUM_NAMED])}{more}; leaving them out would change the answers, "
                "so fix config.json or export the checkpoint without them"
            )

    def _place(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        num_bytes = stored.numel() * self.dtype.itemsize
        what = f"tensor {name!r} of {self.folder}"
        with room_for(what, "model.dtype or use a larger device", self.device, num_bytes):
            placed, is_finite = copy_checked(stored, self.device, self.dtype)
        if not is_finite:
            where = self.folder / self._file_of[name]
            lost = f" after conversion to {self.dtype}" if torch.isfinite(stored).all() else ""
            raise CheckpointError(
                f"tensor {name!r} in {where} must be finite, got NaN or infinity{lost}"
            )
        return placed

    def _open(self, file_name: str) -> None:
        """Open a file and note its tensors; none may be in a file that is open already."""
        path = self.folder / file_name
        missing = f"{self.folder / INDEX_FILE} names {shown(file_name)}, which does not exist in {self.folder}"
        open_regular(path, "read", CheckpointError, missing=missing).close()
        try:
            self._files[file_name] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file (truncated, damaged or another format): "
                f"{printable(str(error), _MAX_REASON)}"
            ) from error
        for name in self._files[file_name].keys():  # noqa: SIM118 - the handle is no mapping
            if name in self._file_of:
                raise CheckpointError(
                    f"{self.folder} holds tensor {shown(name)} twice, in {self._file_of[name]!r} and in {file_name!r}; "
                    "remove the stale one"
                )
            self._file_of[name] = file_name

    def _check_index(self, file_of: Mapping[str, str]) -> None:
        """The index and the files must say the same."""
        path = self.folder / INDEX_FILE
        for name, file_name in file_of.items():
            holder = self._file_of.get(name)
            if holder != file_name:
                other = f"; {holder!r} does" if holder else ""
                raise CheckpointError(
                    f"{path} places tensor {shown(name)} in {shown(file_name)}, which does not hold it{other}"
                )
        unlisted = sorted(self._file_of.keys() - file_of.keys())
        if unlisted:
            raise CheckpointError(
                f"{path} does not list tensor {shown(unlisted[0])}, which {self._file_of[unlisted[0]]!r} holds"
            )


def copy_checked(
    stored: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """A copy of contiguous `stored` on the device in the dtype, and whether every element of the copy is finite.

    On the CPU the check reads each piece while it is still in the cache of the copy that wrote it: a pass of its own
    took a fifth of the loading time. The meta device has no elements; there the stored ones are checked.
    """
    if device.type != "cpu" or stored.numel() <= _PIECE:
        placed = stored.to(device=device, dtype=dtype, copy=True)
        return placed, _is_finite(stored if placed.is_meta else placed)
    placed, is_finite = torch.empty(stored.shape, dtype=dtype), True
    from_N, to_N = stored.view(-1), placed.view(-1)
    for first in range(0, stored.numel(), _PIECE):
        piece = to_N[first : first + _PIECE].copy_(from_N[first : first + _PIECE])
        is_finite = is_finite and _is_finite(piece)
    return placed, is_finite


def _is_finite(tensor: torch.Tensor) -> bool:
    """A sum keeps every NaN and infinity; only where it is not finite, which it may be by itself, elements decide."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
