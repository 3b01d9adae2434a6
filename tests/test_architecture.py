"""The shape of the house: who may import whom, where devices and wire types are known, and the tools' verdicts."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import architecture as rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.background import Background

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT_ENDINGS = (
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".proto",
    ".json",
    ".cfg",
    ".sh",
    "",
)

SOURCE_RULES: dict[str, tuple[Callable[[str, str], list[rules.Finding]], str, str]] = {
    "models import xbeam": (
        rules.import_edges,
        "xgr_runtime/models/head.py",
        "from xgr_runtime.xbeam.search import LevelHead",
    ),
    "kvcache imports xbeam": (
        rules.import_edges,
        "xgr_runtime/kvcache/shared.py",
        "import xgr_runtime.xbeam.trie",
    ),
    "types import errors": (
        rules.import_edges,
        "xgr_runtime/types.py",
        "from xgr_runtime import errors",
    ),
    "an import inside a function": (
        rules.import_edges,
        "xgr_runtime/hal/cpu.py",
        "def f():\n    from xgr_runtime.xschedule import engine\n",
    ),
    "a relative import": (
        rules.import_edges,
        "xgr_runtime/hal/ops/beam.py",
        "from ...models import head",
    ),
    "an import by name": (
        rules.import_edges,
        "xgr_runtime/hal/cpu.py",
        "import_module('xgr_runtime.service.server')",
    ),
    "a part of the configuration imports the service": (
        rules.import_edges,
        "xgr_runtime/config_check.py",
        "from xgr_runtime.service import server",
    ),
    "a part of the configuration imports the engine": (
        rules.import_edges,
        "xgr_runtime/config_yaml.py",
        "def f():\n    from xgr_runtime.xschedule.engine import Engine\n",
    ),
    "a part of the configuration imports its command": (
        rules.import_edges,
        "xgr_runtime/config_check.py",
        "from xgr_runtime import config_cli",
    ),
    "types import a part of the configuration": (
        rules.import_edges,
        "xgr_runtime/types.py",
        "from xgr_runtime.config_check import RANGES",
    ),
    "hal imports the command line": (
        rules.import_edges,
        "xgr_runtime/hal/cpu.py",
        "from xgr_runtime import cli",
    ),
    "hal imports the doctor": (
        rules.import_edges,
        "xgr_runtime/hal/discovery.py",
        "from xgr_runtime.doctor import examine",
    ),
    "the engine imports a command": (
        rules.import_edges,
        "xgr_runtime/xschedule/engine.py",
        "import xgr_runtime.shipped_cli",
    ),
    "the service imports a command of its own": (
        rules.import_edges,
        "xgr_runtime/service/server.py",
        "from xgr_runtime.service.service_cli import add_serve_parser",
    ),
    "the service's command imports the doctor": (
        rules.import_edges,
        "xgr_runtime/service/service_cli.py",
        "from xgr_runtime.doctor import examine",
    ),
    "the conformance run imports the service": (
        rules.import_edges,
        "xgr_runtime/conformance/run.py",
        "from xgr_runtime.service.server import serve",
    ),
    "the conformance run imports a provider": (
        rules.import_edges,
        "xgr_runtime/conformance/parity.py",
        "import xgr_ops.cpu.beam",
    ),
    "the service imports the conformance run": (
        rules.import_edges,
        "xgr_runtime/service/server.py",
        "from xgr_runtime.conformance import run",
    ),
    "a layer imports the package's front": (
        rules.import_edges,
        "xgr_runtime/xbeam/rules.py",
        "from xgr_runtime import Engine",
    ),
    "rules import what comes with the package": (
        rules.import_edges,
        "xgr_runtime/xbeam/rules.py",
        "from xgr_runtime.shipped import config_file",
    ),
    "what comes with the package imports the configuration": (
        rules.import_edges,
        "xgr_runtime/shipped.py",
        "from xgr_runtime.config import load_config",
    ),
    "files import the configuration": (
        rules.import_edges,
        "xgr_runtime/files.py",
        "from xgr_runtime.config import RuntimeConfig",
    ),
    "torch in the totals": (
        rules.torch_in_torch_free,
        "xgr_runtime/xschedule/totals.py",
        "import torch",
    ),
    "torch in the check of requests": (
        rules.torch_in_torch_free,
        "xgr_runtime/xschedule/request_check.py",
        "from torch import Tensor",
    ),
    "torch in a part of the configuration": (
        rules.torch_in_torch_free,
        "xgr_runtime/config_yaml.py",
        "import torch",
    ),
    "hal imports a provider": (
        rules.import_edges,
        "xgr_runtime/hal/registry.py",
        "import xgr_ops.cpu.beam",
    ),
    "a provider imports the search": (
        rules.provider_edges,
        "ops/cpu/beam.py",
        "from xgr_runtime.xbeam.trie import Trie",
    ),
    "protobuf in the engine": (
        rules.protobuf_outside_service,
        "xgr_runtime/xschedule/engine.py",
        "from xgr_runtime.service._pb.xgr.v1 import recommend_pb2",
    ),
    "grpc in the engine": (
        rules.protobuf_outside_service,
        "xgr_runtime/xschedule/engine.py",
        "import grpc.aio",
    ),
    "torch in the scheduler": (
        rules.torch_in_torch_free,
        "xgr_runtime/xschedule/scheduler.py",
        "import torch",
    ),
    "torch in the catalogue": (
        rules.torch_in_torch_free,
        "xgr_runtime/xbeam/catalog_file.py",
        "from torch import Tensor",
    ),
    "torch.cuda in a model": (
        rules.device_modules,
        "xgr_runtime/models/qwen3.py",
        "import torch\nx = torch.cuda.is_available()",
    ),
    "triton in the search": (
        rules.device_modules,
        "xgr_runtime/xbeam/search.py",
        "import triton.language as tl",
    ),
    "a module that counts": (
        rules.module_state,
        "xgr_runtime/service/metrics.py",
        "counts = {}",
    ),
    "a constant that is changed": (
        rules.module_state,
        "xgr_runtime/xbeam/rules.py",
        "_CACHE = {}\ndef f(key):\n    _CACHE[key] = 1",
    ),
    "a global": (
        rules.module_state,
        "xgr_runtime/xbeam/rules.py",
        "def f():\n    global engine\n    engine = 1",
    ),
    "a path of one machine": (
        rules.machine_paths,
        "README.md",
        "run it in /" + "home/someone/xgr",
    ),
    "work left open": (rules.unwanted_words, "tests/test_x.py", "# TO" + "DO: later"),
    "a test switched off": (
        rules.unwanted_words,
        "tests/test_x.py",
        "pytest.s" + "kip('no device')",
    ),
}
ALLOWED = [
    (rules.import_edges, "xgr_runtime/xschedule/engine.py", "from xgr_runtime.models import head"),
    (rules.import_edges, "xgr_runtime/cli.py", "from xgr_runtime.service import server"),
    (
        rules.import_edges,
        "xgr_runtime/conformance/x.py",
        "from xgr_runtime.xschedule import engine",
    ),
    (rules.import_edges, "xgr_runtime/conformance_cli.py", "from xgr_runtime import doctor"),
    (rules.import_edges, "xgr_runtime/config_check.py", "from xgr_runtime.config import X"),
    (rules.import_edges, "xgr_runtime/config_cli.py", "from xgr_runtime.shipped import x"),
    (rules.import_edges, "xgr_runtime/service/x_cli.py", "from xgr_runtime.shipped import x"),
    (rules.import_edges, "xgr_runtime/service/x_cli.py", "from xgr_runtime.service import y_cli"),
    (rules.import_edges, "xgr_runtime/service/logs.py", "from xgr_runtime import __version__"),
    (rules.provider_edges, "ops/cpu/beam.py", "from xgr_runtime.hal.registry import impl"),
    (rules.protobuf_outside_service, "xgr_runtime/service/server.py", "import grpc"),
    (rules.torch_in_torch_free, "xgr_runtime/xschedule/worker.py", "import torch"),
    (rules.device_modules, "xgr_runtime/hal/cuda.py", "import torch\ntorch.cuda.Stream()"),
    (rules.module_state, "xgr_runtime/hal/providers.py", "MODULES = {'cpu': ()}\nnames = ('a',)"),
    (rules.machine_paths, "README.md", "GET https://host/home/x and a/root/b and $HOME/code/x"),
]


@cache
def tracked_texts() -> dict[str, str]:
    """Path -> text of every text file that git tracks or would track."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    paths = [REPOSITORY / name for name in names if name and Path(name).suffix in TEXT_ENDINGS]
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file()
    }


def python_sources() -> dict[str, str]:
    return {
        path: text
        for path, text in tracked_texts().items()
        if path.endswith(".py") and not path.startswith(rules.GENERATED)
    }


def report(findings: list[rules.Finding]) -> str:
    return "\n".join(map(str, findings))


@pytest.mark.parametrize("name", sorted(SOURCE_RULES))
def test_the_rule_finds_an_offender(name: str) -> None:
    rule, path, source = SOURCE_RULES[name]
    assert rule(path, source), f"{rule.__name__} did not see: {source}"


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_the_rule_lets_right_code_pass(
    rule: Callable[[str, str], list[rules.Finding]], path: str, source: str
) -> None:
    assert report(rule(path, source)) == ""


@pytest.mark.parametrize(
    "rule",
    [
        rules.import_edges,
        rules.provider_edges,
        rules.protobuf_outside_service,
        rules.torch_in_torch_free,
        rules.device_modules,
        rules.module_state,
    ],
    ids=lambda rule: rule.__name__,
)
def test_every_source_keeps_the_rule(rule: Callable[[str, str], list[rules.Finding]]) -> None:
    sources = python_sources()
    assert len(sources) > 20
    findings = [finding for path, text in sources.items() for finding in rule(path, text)]
    assert not findings, report(findings)


@pytest.mark.parametrize(
    "rule", [rules.machine_paths, rules.unwanted_words], ids=lambda rule: rule.__name__
)
def test_every_text_keeps_the_rule(rule: Callable[[str, str], list[rules.Finding]]) -> None:
    findings = [finding for path, text in tracked_texts().items() for finding in rule(path, text)]
    assert not findings, report(findings)


def test_a_word_names_one_package() -> None:
    """Every package of the runtime has a place in the order of imports."""
    folders = {
        path.split("/")[1]
        for path in python_sources()
        if path.startswith("xgr_runtime/") and path.count("/") > 1
    }
    assert folders <= set(rules.LAYERS)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "modules",
    [
        "xgr_runtime",
        "xgr_runtime.types, xgr_runtime.config, xgr_runtime.errors, xgr_runtime.shipped",
        "xgr_runtime.xbeam.catalog, xgr_runtime.xbeam.rules, xgr_runtime.kvcache.allocator",
        "xgr_runtime.xbeam.template, xgr_runtime.xbeam.ranking",
        "xgr_runtime.xschedule.scheduler, xgr_runtime.xschedule.engine_stats",
    ],
)
def test_host_parts_load_without_torch(modules: str) -> None:
    loaded = run_python(f"import sys, {modules}; print([m for m in sys.modules if m == 'torch'])")
    assert loaded == "[]"


def run_tool(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_check() -> None:
    run_tool("ruff", "check", ".")


def test_ruff_format() -> None:
    run_tool("ruff", "format", "--check", ".")


def test_mypy(mypy_beside: Background) -> None:
    code, output = mypy_beside.wait()
    assert code == 0, output


def test_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: a long file is a question for a review."""
    sources = {
        path: text for path, text in python_sources().items() if not path.startswith("tests/")
    }
    files = [rules.Size(path, text.count("\n")) for path, text in sources.items()]
    functions = [
        size for path, text in sources.items() for size in rules.function_sizes(path, text)
    ]
    with capsys.disabled():
        print()  # noqa: T201
        print(rules.size_table("longest files, lines", files, 200))  # noqa: T201
        print(rules.size_table("longest functions, lines", functions, 40))  # noqa: T201
    assert files
    assert functions
