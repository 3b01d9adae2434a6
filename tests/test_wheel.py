"""The wheel outside the checkout: its content, the sdist that makes the same, and the commands in an empty folder."""

from __future__ import annotations

import json
import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest

from tools import build_dist
from tools._packaging import distributions as dist
from tools._packaging import environments as env
from tools._packaging.service import serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e
# Where a folder of the checkout lies in the wheel, and the endings of what is in it.
CONTENT = {
    "xgr_runtime/": ("xgr_runtime/", (".py", ".pyi", "py.typed", "conformance/vectors.json")),
    "ops/": ("xgr_ops/", (".py", "ascend/FIRST_DAY.md", "ascend/README.md")),
    "configs/": ("xgr_runtime/configs/", ("",)),
    "proto/": ("xgr_runtime/proto/", (".py", ".proto")),
    "tools/demo/": ("xgr_runtime/demo/", (".py",)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, as `make dist` builds them."""
    out = tmp_path_factory.mktemp("dist")
    assert build_dist.main(["--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, without the demo's data."""
    folder = tmp_path_factory.mktemp("environment")
    return env.make_environment(folder, env.entries_without("recbole"), offline(wheel))


def offline(wheel: Path) -> list[str]:
    """pip's arguments that install a wheel alone."""
    return ["--no-index", "--no-deps", str(wheel)]


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            if ".dist-info/" not in name and not name.endswith("/")
        }


def test_the_wheel_holds_exactly_these_files(wheel: Path) -> None:
    expected = {
        target + name.removeprefix(folder): (dist.ROOT / name).read_bytes()
        for name in dist.tracked_files()
        for folder, (target, endings) in CONTENT.items()
        if name.startswith(folder) and name.endswith(endings)
    }
    content = files_of(wheel)
    assert sorted(content) == sorted(expected)
    assert [name for name in expected if content[name] != expected[name]] == []


def test_an_sdist_makes_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    tree = dist.unpack_sdist(sdist, tmp_path / "unpacked")
    again = dist.build(tree, "wheel", tmp_path)
    assert files_of(again) == files_of(wheel)


def test_commands_that_print(commands: Path, tmp_path: Path) -> None:
    xgr = str(commands / "xgr")
    assert "usage: xgr" in env.run([xgr, "--help"], tmp_path).stdout
    proto = env.run([xgr, "proto"], tmp_path).stdout.rstrip("\n")
    assert proto.startswith(str(commands.parent))
    name = "xgr/v1/recommend.proto"
    with open(f"{proto}/{name}", encoding="utf-8") as file:
        assert file.read() == (dist.ROOT / "proto" / name).read_text(encoding="utf-8")
    reference = env.run([xgr, "config", "reference"], tmp_path).stdout
    assert reference == (dist.ROOT / "configs" / "reference.yaml").read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_the_providers(commands: Path, tmp_path: Path) -> None:
    report = json.loads(env.run([str(commands / "xgr"), "doctor", "--json"], tmp_path).stdout)
    providers = {op["provider"] for op in report["ops"] if op["device"] == "cpu"}
    assert len(providers) > 1, "the providers of ops/ and the references"
    assert None not in providers


def test_conformance_has_its_vectors(commands: Path, tmp_path: Path) -> None:
    """The command itself runs from a checkout in tests/conformance; what a wheel may lack is its data."""
    code = "from xgr_runtime.conformance.vectors import load_vectors; print(len(load_vectors().vectors))"
    assert env.run([str(commands / "python"), "-c", code], tmp_path).stdout == "40\n"
    assert "--device KIND" in env.run([str(commands / "xgr"), "conformance", "-h"], tmp_path).stdout


def test_serve_a_configuration_by_name(commands: Path, tmp_path: Path) -> None:
    with serving(commands, tmp_path) as target:
        command = [str(commands / "xgr"), "client", "--target", target, "--json"]
        command += ["--history-ids", "50,172,181", "--num-results", "3", "--exclude-history"]
        command += ["--timeout-s", "60"]
        (result,) = json.loads(env.run(command, tmp_path).stdout)["results"]
    ids = [item["item_id"] for item in result["items"]]
    assert len(set(ids) - {50, 172, 181}) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_the_demo_says_where_its_data_comes_from(commands: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [commands / "xgr", "demo"],
        cwd=tmp_path,
        env=env.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("xgr: DemoError: ")
    assert "pip install --no-deps recbole==1.2.1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_runs(wheel: Path, tmp_path: Path) -> None:
    commands = env.make_environment(tmp_path / "environment", env.entries_without(), offline(wheel))
    (tmp_path / "empty").mkdir()
    env.run([str(commands / "xgr"), "demo"], tmp_path / "empty")
    report = json.loads((tmp_path / "empty" / "demo-report.json").read_text(encoding="utf-8"))
    assert (report["num_users"], report["num_invalid_items"]) == (943, 0)
