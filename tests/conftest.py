"""What every test runs under: the device asked for, the shared data, one thread, and the conservation of pages.

Nothing here skips. A device that is absent is an error of the command line; tests whose data is absent and long runs
that were not asked for (--slow) are deselected, and the number of them and the reason are printed, so that a green run
says what it did not run.

`--device npu --fake-npu` runs them on a device of the tests' own on host memory (tests/ascend/backend.py), and says so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from tests.cuda.broken_device import EndWithBrokenDevice
from tests.helpers import devices
from tests.helpers.background import Background
from tests.helpers.conservation import PageWatch
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.ascend import npu
from xgr_runtime.hal.discovery import DEVICE_KINDS, open_device
from xgr_runtime.hal.triton_kernels import why_not_found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helpers.versions import Versions
    from xgr_runtime.hal.device import Device

DATA_VARIABLE = "XGR_TEST_DATA"
DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

MOST_FAKE_BYTES = 1 << 29

DEVICE = pytest.StashKey["Device"]()
DESELECTED = pytest.StashKey[dict[str, int]]()
MYPY = pytest.StashKey[Background]()

# The suite is the same on every run; `--hypothesis-profile=explore` draws new examples. How long either takes is the machine's.
AT_ANY_SPEED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("xgr", AT_ANY_SPEED, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", AT_ANY_SPEED, max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=tuple(DEVICE_KINDS),
        default="cpu",
        help="the device that the tests run on",
    )
    parser.addoption(
        "--slow", action="store_true", help="run the long variants too (marker slow: minutes each)"
    )
    parser.addoption(
        "--fake-npu",
        action="store_true",
        help="with --device npu: on host memory, under the rules of a card (builds C++ once)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fake_npu: runs only with --device npu --fake-npu")
    torch.set_num_threads(1)
    if config.getoption("fake_npu"):
        install_fake_npu(config.getoption("device"))
    if not config.getoption("hypothesis_profile", None):
        hypothesis.settings.load_profile("xgr")
    try:
        config.stash[DEVICE] = open_device(config.getoption("device")).device
        devices.use(config.stash[DEVICE])
        if config.stash[DEVICE].kind == "cuda":
            config.pluginmanager.register(EndWithBrokenDevice(config.stash[DEVICE]))
    except DeviceError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[DESELECTED] = {}
    data = os.environ.get(DATA_VARIABLE)
    if data is not None and not Path(data).is_dir():
        raise pytest.UsageError(f"{DATA_VARIABLE} must name a folder, got {data!r}")


def install_fake_npu(device: str) -> None:
    """Give this process the fake NPU and the vendor's ops as the tests read them."""
    if device != "npu":
        raise pytest.UsageError(f"--fake-npu is an NPU: it needs --device npu, got {device}")
    # Not at the top: a run without it builds nothing.
    from tests.ascend import backend, vendor_attention, vendor_ops  # noqa: PLC0415

    try:
        backend.install()
    except backend.BuildFailed as error:
        raise pytest.UsageError(f"--fake-npu: {error}") from error
    vendor_ops.define()
    vendor_attention.define()


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    fake = " (fake: computes on host memory)" if config.getoption("fake_npu") else ""
    return f"device: {device.kind}, {device.name} {device.capability}".rstrip() + (
        f"{fake}, torch {torch.__version__}"
    )


def data_folder() -> Path:
    """The folder of the shared test data; it need not exist."""
    return Path(os.environ.get(DATA_VARIABLE, DEFAULT_DATA))


@cache
def why_no_triton() -> str | None:
    """What is missing of a Triton that says what it compiles, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton 3.6, and there is none"
    return None if why_not_found() is None else f"Triton 3.6: {why_not_found()}"


def why_deselected(item: pytest.Item) -> str | None:
    """Why a test does not belong to this run, None when it does."""
    if item.get_closest_marker("shared_data") is not None and not data_folder().is_dir():
        return f"need the shared test data, and {data_folder()} is absent (set {DATA_VARIABLE})"
    if item.get_closest_marker("triton") is not None and why_no_triton() is not None:
        return f"need {why_no_triton()}"
    if item.get_closest_marker("slow") is not None and not item.config.getoption("slow"):
        return "are long runs, and run only with --slow"
    if item.get_closest_marker("fake_npu") is not None and not item.config.getoption("fake_npu"):
        return "need the fake NPU (--device npu --fake-npu)"
    marker = item.get_closest_marker("device")
    kind = item.config.stash[DEVICE].kind
    if marker is not None and kind not in marker.args:
        return f"run only with --device {' or '.join(marker.args)}, this run has {kind}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, dropped = [], []
    for item in items:
        reason = why_deselected(item)
        if reason is None:
            kept.append(item)
        else:
            dropped.append(item)
            counts = config.stash[DESELECTED]
            counts[reason] = counts.get(reason, 0) + 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """mypy takes as long as hundreds of tests, which leave a core idle: its test only asks how it ended.

    What the imports and the collection made stays to the end: no garbage collection looks at it again. On the CPU there are
    fewer of them, too; elsewhere engines that went in cycles hold the memory of a device.
    """
    gc.collect()
    gc.freeze()
    if session.config.stash[DEVICE].kind == "cpu":
        gc.set_threshold(5000)
    is_worker = hasattr(
        session.config, "workerinput"
    )  # of several that have the same tests, one of which runs it
    if any(item.name == "test_mypy" for item in session.items) and not is_worker:
        session.config.stash[MYPY] = Background("mypy")


def pytest_unconfigure(config: pytest.Config) -> None:
    if MYPY in config.stash:
        config.stash[MYPY].stop()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, count in sorted(config.stash[DESELECTED].items()):
        terminalreporter.write_line(f"not run: {count} tests {reason}", yellow=True)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """The device of this run."""
    return request.config.stash[DEVICE]


@pytest.fixture(scope="session")
def mypy_beside(request: pytest.FixtureRequest) -> Background:
    """mypy over the whole project, started before the first test where it could be."""
    stash = request.config.stash
    if MYPY not in stash:
        stash[MYPY] = Background("mypy")
    return stash[MYPY]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the shared test data, for tests marked `shared_data`."""
    return data_folder()


@pytest.fixture(scope="session")
def versions_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that fits every catalogue of `versions`."""
    # Not at the top: they import transformers, which takes seconds that most tests do not need.
    from tests.helpers.tiny_models import TinyShape, write_tiny_model  # noqa: PLC0415
    from tests.helpers.versions import VOCAB  # noqa: PLC0415

    shape = TinyShape(vocab_size=VOCAB)
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", shape)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    """Versions of one catalogue in the test's folder."""
    from tests.helpers.versions import Versions  # noqa: PLC0415

    return Versions(tmp_path)


@pytest.fixture(scope="session")
def page_watch() -> Iterator[PageWatch]:
    """Knows every page allocator that is made during the session."""
    watch = PageWatch()
    with watch.watching():
        yield watch


@pytest.fixture(autouse=True)
def pages_are_conserved(page_watch: PageWatch) -> Iterator[None]:
    """After every test: no page allocator has lost or doubled a page, and idle engines hold none."""
    yield
    page_watch.check()


@pytest.fixture(autouse=True)
def nothing_is_held_against(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the fake NPU: what its last tensors broke when they went is raised here, not in the next test."""
    yield
    if request.config.getoption("fake_npu"):
        # Engines go in cycles. Its memory is written when it is allocated, so that every one that waits costs all it asked for.
        if npu().memory_allocated() > MOST_FAKE_BYTES:
            gc.collect()
        torch.ops.xgr_fake_npu.raise_accusation()


@pytest.fixture(autouse=True)
def the_gpu_has_finished(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on a GPU: what it left running ends here, so that an error of it is not the next test's."""
    yield
    device = request.config.stash[DEVICE]  # tests have parameters called `device`, too
    if device.kind == "cuda":
        device.synchronize()
