"""Loading: every layout that is accepted, and every refusal with what was expected and got."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import CPU, REFERENCE_OPS, VOCAB, PackedBatch, make_checkpoint
from xgr_runtime.errors import CheckpointError
from xgr_runtime.models.base import RecModel
from xgr_runtime.models.registry import load_model

Tensors = dict[str, torch.Tensor]
HISTORY = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(folder, "qwen3", head_dim=16)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    make_checkpoint(folder, "qwen2")
    return folder


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> RecModel:
    return load_model(folder, CPU, dtype)


def hidden_of(model: RecModel) -> torch.Tensor:
    batch = PackedBatch(model, [HISTORY])
    hidden = model.context(REFERENCE_OPS, batch.context_inputs(), batch.kv)
    assert hidden is not None
    return hidden[:1]


def refuse(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in parts:
        assert part in str(caught.value)


def test_sharded_and_single_files_give_the_same_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "single", "qwen3", head_dim=16)
    make_checkpoint(tmp_path / "sharded", "qwen3", head_dim=16, max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    single, sharded = load(tmp_path / "single"), load(tmp_path / "sharded")
    assert torch.equal(hidden_of(single), hidden_of(sharded))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16, dtype=stored)
    model = load(tmp_path, wanted)
    expected = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert expected.dtype == stored
    assert torch.equal(model.head.weight_VM, expected.to(wanted))
    assert model.kv_spec.shared.dtype == model.kv_spec.unshared.dtype == wanted
    assert hidden_of(model).dtype == wanted


def test_older_configs_with_rope_theta_load_alike(qwen3: Path, tmp_path: Path) -> None:
    folder = copy(qwen3, tmp_path)
    expected = hidden_of(load(folder))
    edit_config(folder, rope_parameters=..., rope_theta=10000.0, rope_scaling=None)
    assert torch.equal(hidden_of(load(folder)), expected)
    edit_config(folder, rope_scaling={"type": "default"})
    assert torch.equal(hidden_of(load(folder)), expected)
    edit_config(folder, rope_theta=1e6)
    assert not torch.equal(hidden_of(load(folder)), expected)


def test_unused_sliding_windows_are_no_reason_to_refuse(qwen2: Path, tmp_path: Path) -> None:
    folder = copy(qwen2, tmp_path)
    edit_config(folder, layer_types=..., use_sliding_window=False, sliding_window=32768)
    load(folder)
    edit_config(folder, use_sliding_window=True, max_window_layers=2)
    load(folder)


def test_a_tied_checkpoint_may_store_the_same_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    expected = hidden_of(load(tmp_path))

    def store_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(tmp_path, store_head)
    assert torch.equal(hidden_of(load(tmp_path)), expected)
    edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    refuse(tmp_path, "tie_word_embeddings is true, but lm_head.weight differs")


def test_generation_defaults_are_never_read(qwen3: Path, tmp_path: Path) -> None:
    folder = copy(qwen3, tmp_path)
    (folder / "generation_config.json").write_text("{ not even JSON")
    load(folder)


def test_missing_folder_and_files(qwen3: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "config.json does not exist", "expected a Hugging Face directory")
    folder = copy(qwen3, tmp_path)
    (folder / "model.safetensors").unlink()
    refuse(folder, "holds neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").write_text("[1, 2]")
    refuse(folder, "config.json must hold a JSON object, got list")
    (folder / "config.json").write_text("{")
    refuse(folder, "config.json is not JSON")


def test_pickle_files_are_never_opened(qwen3: Path, tmp_path: Path) -> None:
    folder = copy(qwen3, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    refuse(folder, "pytorch_model.bin", "pickle files are never loaded")


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
        "max_position_embeddings",
    ],
)
def test_missing_keys(qwen3: Path, tmp_path: Path, key: str) -> None:
    folder = copy(qwen3, tmp_path)
    edit_config(folder, **{key: ...})
    refuse(folder, "config.json", f"lacks the key {key!r}")


SCALED = [
    {"rope_type": name, "factor": 4.0, "rope_theta": 1e4}
    for name in ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
]


@pytest.mark.parametrize("parameters", SCALED, ids=lambda p: p["rope_type"])
def test_scaled_rope_is_refused_by_name(
    qwen3: Path, tmp_path: Path, parameters: dict[str, Any]
) -> None:
    folder = copy(qwen3, tmp_path)
    name = repr(parameters["rope_type"])
    edit_config(folder, rope_parameters=parameters)
    refuse(folder, "rope_parameters", name, "only 'default' (unscaled) is supported")
    edit_config(folder, rope_parameters=..., rope_theta=1e4, rope_scaling=parameters)
    refuse(folder, "rope_scaling", name)
    old_style = {"type": parameters["rope_type"], "factor": 4.0}
    edit_config(folder, rope_scaling=old_style)
    refuse(folder, "rope_scaling", name)
    both = {"rope_type": "default", "rope_theta": 1e4}
    edit_config(folder, rope_parameters=both)
    refuse(folder, "rope_scaling", name)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown-architecture": (
        {"architectures": ["MambaForCausalLM"]},
        ("'MambaForCausalLM'", "Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM"),
    ),
    "no-architecture": ({"architectures": ...}, ("architectures must name one of", "None")),
    "no-rope-theta": ({"rope_parameters": ...}, ("lacks the key 'rope_theta'",)),
    "rope-per-layer-type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        ("rope_parameters must hold rope_type 'default' and rope_theta only",),
    ),
    "partial-rotary": (
        {"partial_rotary_factor": 0.5},
        ("partial_rotary_factor must be 1, got 0.5",),
    ),
    "two-rope-thetas": ({"rope_theta": 1e6}, ("rope_theta is given twice: 10000.0 and 1000000.0",)),
    "rope-theta-text": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        ("rope_theta must be a positive number, got '1e4'",),
    ),
    "sliding-layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ("must be 'full_attention', got sliding_attention",),
    ),
    "sliding-window": (
        {
            "layer_types": ...,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        ("sliding-window and other sparse attention is not supported",),
    ),
    "sliding-window-without-a-switch": (
        {"architectures": ["LlamaForCausalLM"], "layer_types": ..., "sliding_window": 4},
        ("sliding-window and other sparse attention is not supported",),
    ),
    "sliding-window-from-text": (
        {
            "layer_types": ...,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": "x",
        },
        ("max_window_layers must be an integer of at least 0, got 'x'",),
    ),
    "sliding-window-list": (
        {"layer_types": ..., "use_sliding_window": True, "sliding_window": [8]},
        ("sliding_window must be an integer of at least 0, got [8]",),
    ),
    "layer-types-number": ({"layer_types": 5}, ("layer_types must be a list of names, got 5",)),
    "layer-types-text": (
        {"layer_types": "full_attention"},
        ("layer_types must be a list of names, got 'full_attention'",),
    ),
    "layer-types-lists": (
        {"layer_types": ["full_attention", ["full_attention"]]},
        ("layer_types must be a list of names, got ['full_attention', ['full_attention']]",),
    ),
    "layer-types-none-named": (
        {"layer_types": []},
        ("layer_types must name each of the 2 layers (num_hidden_layers), got 0 names",),
    ),
    "layer-types-too-few": (
        {"layer_types": ["full_attention"]},
        ("layer_types must name each of the 2 layers (num_hidden_layers), got 1 names",),
    ),
    "layer-types-too-many": (
        {"layer_types": ["full_attention"] * 3},
        ("layer_types must name each of the 2 layers (num_hidden_layers), got 3 names",),
    ),
    "architecture-list": (
        {"architectures": [["Qwen3ForCausalLM"]]},
        ("architectures must name one of Qwen3ForCausalLM", "got [['Qwen3ForCausalLM']]"),
    ),
    "architecture-object": ({"architectures": [{}]}, ("architectures must name one of", "[{}]")),
    "architecture-number": ({"architectures": [5]}, ("architectures must name one of", "[5]")),
    "activation-list": ({"hidden_act": ["silu"]}, ("hidden_act must be 'silu', got ['silu']",)),
    "rope-type-list": (
        {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}},
        ("rope_parameters asks for rope type ['default']",),
    ),
    "rope-text": ({"rope_parameters": "default"}, ("rope_parameters must be an object",)),
    "rope-theta-infinite": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        ("rope_theta must be a positive number, got inf",),
    ),
    "eps-nan": ({"rms_norm_eps": float("nan")}, ("rms_norm_eps must be a positive number",)),
    "no-positions": (
        {"max_position_embeddings": 0},
        ("max_position_embeddings must be a positive integer, got 0",),
    ),
    "activation": ({"hidden_act": "gelu"}, ("hidden_act must be 'silu', got 'gelu'",)),
    "quantised": (
        {"quantization_config": {"quant_method": "awq"}},
        ("quantization_config is set", "quantised checkpoints are not supported"),
    ),
    "heads-do-not-divide": (
        {"num_key_value_heads": 3},
        ("num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",),
    ),
    "hidden-does-not-divide": (
        {"head_dim": ..., "num_attention_heads": 6},
        ("hidden_size must be a multiple of num_attention_heads", "32 and 6"),
    ),
    "odd-head-dim": ({"head_dim": 15}, ("head_dim must be even, got 15",)),
    "zero-layers": ({"num_hidden_layers": 0}, ("num_hidden_layers must be a positive integer",)),
    "text-size": ({"hidden_size": "32"}, ("hidden_size must be a positive integer, got '32'",)),
    "flag-number": ({"tie_word_embeddings": 1}, ("tie_word_embeddings must be true or false",)),
    "wrong-vocabulary": (
        {"vocab_size": 100},
        ("'model.embed_tokens.weight'", "shape [100, 32]", f"got [{VOCAB}, 32]"),
    ),
    "more-layers": (
        {"num_hidden_layers": 3, "layer_types": ...},
        ("lacks tensor 'model.layers.2.",),
    ),
    "fewer-layers": (
        {"num_hidden_layers": 1, "layer_types": ...},
        ("does not use: model.layers.1.", "and 6 more"),
    ),
    "biases-promised": (
        {"attention_bias": True},
        ("lacks tensor 'model.layers.0.self_attn.q_proj.bias'", "shape [64]"),
    ),
    "tied-but-untied": ({"tie_word_embeddings": True}, ("lm_head.weight differs",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_configs(qwen3: Path, tmp_path: Path, case: str) -> None:
    changes, parts = REFUSED[case]
    folder = copy(qwen3, tmp_path)
    edit_config(folder, **changes)
    refuse(folder, str(folder), *parts)


def test_missing_tensor(qwen3: Path, tmp_path: Path) -> None:
    folder = copy(qwen3, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refuse(folder, "lacks tensor 'lm_head.weight'", f"shape [{VOCAB}, 32]")


def test_a_bias_that_the_architecture_does_not_use(qwen2: Path, tmp_path: Path) -> None:
    folder = copy(qwen2, tmp_path)
    edit_config(folder, architectures=["LlamaForCausalLM"])
    refuse(folder, "does not use: model.layers.0.self_attn.k_proj.bias")


def test_wrong_shape(qwen3: Path, tmp_path: Path) -> None:
    folder, name = copy(qwen3, tmp_path), "model.layers.1.mlp.down_proj.weight"

    def transpose(tensors: Tensors) -> None:
        tensors[name] = tensors[name].T.contiguous()

    edit_tensors(folder, transpose)
    refuse(folder, name, "shape [32, 40]", "got [40, 32]")


def test_quantised_storage(qwen3: Path, tmp_path: Path) -> None:
    folder, name = copy(qwen3, tmp_path), "model.layers.1.mlp.down_proj.weight"

    def to_int8(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    edit_tensors(folder, to_int8)
    refuse(folder, name, "one of BF16, F16, F32, got I8")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(qwen3: Path, tmp_path: Path, keep: int) -> None:
    path = copy(qwen3, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(path.parent, str(path), "not a whole safetensors file")


def test_foreign_file(qwen3: Path, tmp_path: Path) -> None:
    path = copy(qwen3, tmp_path) / "model.safetensors"
    path.write_bytes(pickle.dumps(list(range(1000))))
    refuse(path.parent, str(path), "not a whole safetensors file")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen3", head_dim=16, max_shard_size="10KB")
    return tmp_path


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_that_names_an_absent_file(sharded: Path) -> None:
    edit_index(sharded, lambda index: index.update({"model.norm.weight": "gone.safetensors"}))
    refuse(sharded, "index.json names 'gone.safetensors', which does not exist")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "model.bin"])
def test_index_that_names_files_elsewhere(sharded: Path, name: str) -> None:
    edit_index(sharded, lambda index: index.update({"model.norm.weight": name}))
    refuse(sharded, repr(name), "plain name of a .safetensors file in the same folder")


def test_index_that_misplaces_a_tensor(sharded: Path) -> None:
    edit_index(
        sharded,
        lambda index: index.update({"model.norm.weight": index["model.embed_tokens.weight"]}),
    )
    refuse(sharded, "places tensor 'model.norm.weight' in", "which does not hold it")


def test_index_without_a_map(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    refuse(sharded, "must hold a 'weight_map'")


def test_a_missing_shard(sharded: Path) -> None:
    sorted(sharded.glob("*.safetensors"))[2].unlink()
    refuse(sharded, "which does not exist in")


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "num_hidden_layers", "head_dim", "max_position_embeddings", "rms_norm_eps"],
)
def test_numbers_of_thousands_of_digits_are_named_by_key(
    qwen3: Path, tmp_path: Path, key: str
) -> None:
    folder = copy(qwen3, tmp_path)
    edit_config(folder, **{key: "HERE"})
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"HERE"', "9" * 5000))
    refuse(folder, str(path), f"{key} must be a positive", "got '9999", "9999'")


def test_numbers_of_thousands_of_digits_that_nobody_reads(qwen3: Path, tmp_path: Path) -> None:
    folder = copy(qwen3, tmp_path)
    edit_config(folder, unknown_key="HERE")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"HERE"', "9" * 5000))
    load(folder)


def test_a_path_that_no_folder_has() -> None:
    refuse(Path("a\0b"), "cannot read 'a\\x00b/config.json'")


def test_not_finite_weights_are_refused_by_name(qwen3: Path, tmp_path: Path) -> None:
    folder, name = copy(qwen3, tmp_path), "model.layers.1.mlp.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name][3, 5].fill_(torch.nan))
    refuse(folder, f"tensor {name!r} in {folder / 'model.safetensors'} must be finite, got NaN")
