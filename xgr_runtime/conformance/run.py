"""A whole conformance run: parity of every provider, the search vectors, the decoder; saved after every part.

What a part raises is its failure, and the next part runs. A device that is lost ends the run, with all parts before it
in the report; so does whatever ends the process, since the report is written before each part starts and names it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xgr_runtime import __version__
from xgr_runtime.conformance.decoder_check import DecoderCheck
from xgr_runtime.conformance.engines import EngineEntry, EngineShape
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import (
    DTYPES,
    ParityEntry,
    check_provider,
    implementations,
    why_unusable,
)
from xgr_runtime.conformance.report import (
    Report,
    engine_lines,
    parity_header,
    parity_lines,
)
from xgr_runtime.conformance.searches import SearchCheck
from xgr_runtime.conformance.vectors import VectorSet, load_vectors
from xgr_runtime.errors import ConfigError, DeviceLost
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import Op, all_ops

Part = tuple[str, Callable[[], ParityEntry | EngineEntry]]


def chosen_ops(names: Sequence[str]) -> dict[str, Op[..., object]]:
    """The ops of these names, all without any. Raises ConfigError naming the known ones."""
    known = all_ops()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown op {', '.join(unknown)}; known: {', '.join(known)}")
    return {name: op for name, op in known.items() if not names or name in names}


def new_report(
    device: Device, ops: Sequence[str], environment: Mapping[str, Any], *, allow_reference: bool
) -> Report:
    """A report in which nothing has run."""
    facts = {"kind": device.kind, "name": device.name, "capability": device.capability}
    return Report(
        xgr_version=__version__,
        started_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        environment=environment,
        device=facts,
        options={"ops": list(ops), "allow_reference": allow_reference},
        load_failures=tuple((f.module, f.reason) for f in load_providers(device.kind)),
    )


def run(
    device: Device,
    report: Report,
    parts: Iterable[Part],
    *,
    save: Callable[[Report], None] = lambda report: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Run parts into a report. save: called before each part and at the end. say: gets lines for a terminal."""
    start = time.perf_counter()
    say(parity_header())
    try:
        for name, part in parts:
            report.in_progress = name
            report.seconds = time.perf_counter() - start
            save(report)
            _note(report, part(), device, say)
        report.is_complete = True
        report.in_progress = ""
    except DeviceLost as error:
        report.stopped = str(error)
    finally:
        report.seconds = time.perf_counter() - start
        save(report)


def _note(
    report: Report,
    entry: ParityEntry | EngineEntry,
    device: Device,
    say: Callable[[str], None],
) -> None:
    if isinstance(entry, ParityEntry):
        report.parity.append(entry)
        lines = parity_lines(entry)
    else:
        report.engines.append(entry)
        lines = engine_lines(entry)
    for line in lines:
        say(line)
    why_lost = why_unusable(device) if entry.num_failed else ""
    if why_lost:
        raise DeviceLost(f"{device.name} is lost: {why_lost}")


def all_parts(device: Device, report: Report, folder: Path) -> Iterator[Part]:
    """Everything that the report's options ask for. folder: an empty one, for what engines load."""
    yield from parity_parts(device, report)
    yield from search_parts(device, report, load_vectors(), folder)
    yield from decoder_parts(device, report, folder)


def parity_parts(device: Device, report: Report) -> Iterator[Part]:
    """Every provider of the chosen ops in every dtype, the reference included."""
    for name, op in chosen_ops(report.options["ops"]).items():
        for provider, fn in implementations(op, device.kind):
            for dtype in DTYPES:
                check = partial(check_provider, op, provider, fn, dtype, device, GENERATORS[name])
                yield f"{name}, {provider}, {_name(dtype)}", check


def search_parts(
    device: Device, report: Report, vectors: VectorSet, folder: Path
) -> Iterator[Part]:
    """The vectors in every dtype. Small pages are crossed by short prompts too; kernels may want pages of 128 tokens."""
    check = SearchCheck(vectors, _folder(folder, "searches"))
    for dtype in DTYPES:
        yield _engine_part(check, device, report, EngineShape(dtype, 4))
        is_refused = report.engines[-1].result == "refused"
        for is_dense in (True, False) if is_refused else (False,):
            yield _engine_part(check, device, report, EngineShape(dtype, 128, is_dense))


def decoder_parts(device: Device, report: Report, folder: Path) -> Iterator[Part]:
    """The decoder in every dtype, with small pages and with those that fused kernels take."""
    for dtype in DTYPES:
        check = DecoderCheck(dtype, _folder(folder, f"decoder-{_name(dtype)}"))
        for page_size in (16, 128):
            yield _engine_part(check, device, report, EngineShape(dtype, page_size))


def _engine_part(
    check: SearchCheck | DecoderCheck, device: Device, report: Report, shape: EngineShape
) -> Part:
    allow_reference = report.options["allow_reference"]
    return f"{check.what}, {shape}", partial(
        check.run, device, shape, allow_reference=allow_reference
    )


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
