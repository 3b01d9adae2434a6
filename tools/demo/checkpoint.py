"""The demo's committed files: where they lie, and what the checkpoint says about its making.

The safetensors metadata holds the digest of the training input, the seed, the first losses, the
hyper-parameters and the library versions, so a test can rebuild the input and follow the first
steps. config.json stays what Hugging Face expects and nothing more.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file

from xgr_runtime.shipped import folder

from .network import Network, NetworkConfig
from .template import PAD_TOKEN, START_TOKEN, VOCAB_SIZE, Template

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_FOLDER = folder("configs") / "demo"
MODEL_FOLDER = CONFIG_FOLDER / "model"
ITEMS_PATH = CONFIG_FOLDER / "items.jsonl"
NUM_RECORDED_LOSSES = 20


@dataclass(frozen=True)
class HyperParameters:
    """Chosen on the validation items."""

    seed: int = 1
    epochs: int = 32
    chunk_items: int = 21
    rows_per_step: int = 64
    learning_rate: float = 3e-3
    warmup_epochs: float = 1.0
    weight_decay: float = 0.05
    dropout: float = 0.15

    @property
    def template(self) -> Template:
        """How this model's histories are rendered."""
        return Template(max_history_items=self.chunk_items - 1)


def write_checkpoint(
    folder: Path, network: Network, hyper: HyperParameters, input_sha256: str, losses: list[float]
) -> None:
    """config.json and model.safetensors; the latter's metadata says where it comes from."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.config.to_hugging_face(PAD_TOKEN, START_TOKEN)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    metadata = {
        "format": "pt",
        "input_sha256": input_sha256,
        "seed": str(hyper.seed),
        "first_losses": json.dumps(losses[:NUM_RECORDED_LOSSES]),
        "hyper_parameters": json.dumps(asdict(hyper)),
        "versions": json.dumps(versions),
    }
    save_file(network.state_dict(), str(folder / "model.safetensors"), metadata=metadata)


def read_checkpoint(folder: Path) -> tuple[Network, HyperParameters, dict[str, str]]:
    """(network, the hyper-parameters it was trained with, all metadata)."""
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    hyper = HyperParameters(**json.loads(metadata["hyper_parameters"]))
    network = Network(NetworkConfig(VOCAB_SIZE), hyper.seed)
    network.load_state_dict(weights)
    return network, hyper, metadata
