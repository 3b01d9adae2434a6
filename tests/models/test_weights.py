"""The reader: one place for every tensor, finite values only, whatever the folder says otherwise."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xgr_runtime.errors import CheckpointError, DeviceError
from xgr_runtime.models import weights
from xgr_runtime.models.weights import WeightReader

CPU = torch.device("cpu")
A, B, C = "a.safetensors", "b.safetensors", "c.safetensors"


def write(
    folder: Path, files: dict[str, dict[str, float]], index: dict[str, object] | None = None
) -> Path:
    """Files of tensors of two equal elements, and an index."""
    for file_name, tensors in files.items():
        save_file({name: torch.full((2,), v) for name, v in tensors.items()}, folder / file_name)
    if index is not None:
        text = json.dumps({"weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def refuse(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        WeightReader(folder, CPU, torch.float32)
    for part in parts:
        assert part in str(caught.value)


def test_index_and_files_that_agree(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}, B: {"y": 2.0, "z": 3.0}}, {"x": A, "y": B, "z": B})
    reader = WeightReader(tmp_path, CPU, torch.float32)
    assert [float(reader.take(name, (2,))[0]) for name in "xyz"] == [1.0, 2.0, 3.0]
    reader.finish()


@pytest.mark.parametrize("place", [A, B])
def test_a_tensor_in_two_shards(tmp_path: Path, place: str) -> None:
    write(
        tmp_path, {A: {"x": 1.0, "w": 0.0}, B: {"x": 2.0, "y": 3.0}}, {"x": place, "w": A, "y": B}
    )
    refuse(tmp_path, str(tmp_path), "tensor 'x' twice", repr(A), repr(B))


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}, B: {"y": 2.0}}, {"x": B, "y": B, "w": A})
    refuse(tmp_path, f"places tensor 'x' in {B!r}, which does not hold it; {A!r} does")


def test_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}}, {"x": A, "y": A})
    refuse(tmp_path, f"places tensor 'y' in {A!r}, which does not hold it")


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0, "y": 2.0}}, {"x": A})
    refuse(tmp_path, "index.json does not list tensor 'y'", repr(A))


def test_files_that_the_index_does_not_name_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}, C: {"x": 9.0}}, {"x": A})
    (tmp_path / "damaged.safetensors").write_bytes(b"no safetensors")
    reader = WeightReader(tmp_path, CPU, torch.float32)
    assert reader.take("x", (2,)).tolist() == [1.0, 1.0]
    reader.finish()


def test_a_single_file_beside_an_index_that_names_others(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}, "model.safetensors": {"x": 9.0}}, {"x": A})
    refuse(tmp_path, "model.safetensors and also", "remove the one that is stale")


def test_an_index_of_the_single_file(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"x": 1.0}}, {"x": "model.safetensors"})
    assert WeightReader(tmp_path, CPU, torch.float32).take("x", (2,)).tolist() == [1.0, 1.0]
    write(tmp_path, {}, {"y": "model.safetensors"})
    refuse(tmp_path, "places tensor 'y'")


@pytest.mark.parametrize(
    "name",
    [5, None, ["a.safetensors"], {"a": 1}, "", "a\0.safetensors", "\ud800.safetensors"],
    ids=repr,
)
def test_names_that_no_shard_has(tmp_path: Path, name: object) -> None:
    write(tmp_path, {A: {"x": 1.0}}, {"x": A, "y": name})
    refuse(tmp_path, "index.json names", "for tensor 'y'", "plain name of a .safetensors file")


@pytest.mark.parametrize("text", ["[]", '{"weight_map": []}', '{"weight_map": 5}', "{}"])
def test_an_index_without_a_map(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse(tmp_path, "index.json must hold a")


def test_an_index_that_places_a_tensor_twice(tmp_path: Path) -> None:
    write(tmp_path, {A: {"x": 1.0}, B: {"y": 1.0}})
    text = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "x": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse(tmp_path, "index.json gives 'x' twice")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    wanted: torch.dtype,
    value: float,
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 64)
    for place in (0, 63, 64, 150, 199):
        tensor = torch.ones(10, 20, dtype=stored)
        tensor.view(-1)[place] = value
        save_file({"x": tensor}, tmp_path / "model.safetensors")
        for device in (CPU, torch.device("meta")):
            reader = WeightReader(tmp_path, device, wanted)
            with pytest.raises(
                CheckpointError, match=r"tensor 'x' in .*must be finite, got NaN or"
            ):
                reader.take("x", (10, 20))


def test_infinities_of_both_signs(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([torch.inf, -torch.inf])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="must be finite"):
        WeightReader(tmp_path, CPU, torch.float32).take("x", (2,))


def test_values_beyond_the_dtype_asked_for(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.0, 1e5])}, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path, CPU, torch.bfloat16).take("x", (2,)).isfinite().all()
    with pytest.raises(CheckpointError, match=r"infinity after conversion to torch.float16"):
        WeightReader(tmp_path, CPU, torch.float16).take("x", (2,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_values_are_finite_though_their_sum_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 64)
    expected = torch.full((200,), torch.finfo(dtype).max, dtype=dtype)
    save_file({"x": expected}, tmp_path / "model.safetensors")
    got = WeightReader(tmp_path, CPU, dtype).take("x", (200,))
    assert torch.equal(got, expected)


def test_a_copy_of_many_pieces_is_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 7)
    expected = torch.randn(9, 11)
    save_file({"x": expected}, tmp_path / "model.safetensors")
    reader = WeightReader(tmp_path, CPU, torch.float32)
    first, second = reader.take("x", (9, 11)), reader.take("x", (9, 11))
    assert torch.equal(first, expected)
    first.zero_()
    assert torch.equal(second, expected)
    got = WeightReader(tmp_path, CPU, torch.bfloat16).take("x", (9, 11))
    assert torch.equal(got, expected.bfloat16())


def test_no_room_for_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    write(tmp_path, {"model.safetensors": {"x": 1.0}})
    monkeypatch.setattr(weights, "copy_checked", no_room)
    with pytest.raises(
        DeviceError, match=r"cpu has no room for 8 bytes of tensor 'x' of .*; lower model.dtype"
    ):
        WeightReader(tmp_path, CPU, torch.float32).take("x", (2,))
