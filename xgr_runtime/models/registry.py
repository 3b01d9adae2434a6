"""From a model directory to a model: config.json names the architecture, this table names its loader."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from xgr_runtime.errors import CheckpointError, DeviceError, shown
from xgr_runtime.models.base import RecModel
from xgr_runtime.models.checkpoint_files import CONFIG_FILE, read_json
from xgr_runtime.models.decoder import load_decoder
from xgr_runtime.models.decoder_config import DECODER_ARCHITECTURES, parse_decoder_config
from xgr_runtime.models.layers.parallel import ParallelContext
from xgr_runtime.models.weights import WeightReader

_SINGLE = ParallelContext()


def load_model(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    parallel: ParallelContext = _SINGLE,
) -> RecModel:
    """Load a Hugging Face directory (config.json and safetensors) onto a device, weights converted to dtype.

    Raises CheckpointError naming what is missing, unsupported, misshapen or not finite, DeviceError when the weights do
    not fit. generation_config.json is never read.
    """
    folder = Path(path)
    source = folder / CONFIG_FILE
    raw = read_json(source)
    architecture = _architecture(raw, source)
    try:
        return _LOADERS[architecture](raw, architecture, folder, device, dtype, parallel)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DeviceError(
            f"{device} has no room for the model in {folder}; lower model.dtype or use a larger device"
        ) from error


def _architecture(raw: Mapping[str, Any], source: Path) -> str:
    named = raw.get("architectures")
    known = ", ".join(_LOADERS)
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise CheckpointError(
            f"{source}: architectures must name one of {known}, got {shown(named)}"
        )
    if named[0] not in _LOADERS:
        raise CheckpointError(f"{source}: unknown architecture {shown(named[0])}; known: {known}")
    return named[0]


def _load_decoder_from(
    raw: Mapping[str, Any],
    architecture: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    parallel: ParallelContext,
) -> RecModel:
    config = parse_decoder_config(raw, architecture, str(folder / CONFIG_FILE))
    return load_decoder(config, WeightReader(folder, device, dtype), parallel)


_Loader = Callable[
    [Mapping[str, Any], str, Path, torch.device, torch.dtype, ParallelContext], RecModel
]
_LOADERS: Mapping[str, _Loader] = dict.fromkeys(DECODER_ARCHITECTURES, _load_decoder_from)
