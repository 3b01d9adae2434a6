"""Committed results: what is there is right and the README says the same; damage is seen; the tools around them work."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from tools import bench_check, plot_results
from tools._bench.engine_rows import NORMALIZATIONS, ROWS
from tools._bench.floor import SHAPES, Work, floor_ms
from tools._bench.results import ENGINE, OPS, Results, load_results, why_wrong
from tools._bench.results_plot import svg
from tools._bench.results_text import NOTHING, PLOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MARKS = f"before\n{plot_results.BEGIN}\nold\n{plot_results.END}\nafter\n"


def made_up() -> Results:
    """Results as a run would write them, three times as slow as their floors."""
    rows = []
    for row in ROWS:
        for normalization in NORMALIZATIONS:
            cached = 896 if row.hit_tokens else 0
            work = Work(row.history, row.width, row.requests, cached, normalization == "vocab")
            floor = round(floor_ms(SHAPES[row.model], work), 4)
            sizes = {"width": row.width, "history": row.history, "requests": row.requests}
            times = {"median_ms": 3 * floor, "p20_ms": 2.9 * floor, "p80_ms": 3.2 * floor}
            rows.append(
                {
                    **{"row": row.name, "commit": "abcdef0", "model": row.model, **sizes},
                    **{"items": 1000, "normalization": normalization, "rules": "none"},
                    **{"cached_tokens": cached, **times, "floor_ms": floor},
                    **{"memory_mib": 5.0, "violations": 0, "near_ties": 2},
                }
            )
    facts = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "date": "today"}
    facts |= {"bf16_product_tflops": 1.0, "copy_tb_per_s": 1.0}  # type: ignore[dict-item]
    part = {"model": "qwen3-0.6B", "width": 512, "history": 3000, "requests": 1, "violations": 0}
    memory = {**part, "num_graphs": 9, "beyond_weights_mib": 1.0}
    load = {**part, "max_batches_in_flight": 2, "peak_reserved_mib": 1.0}
    load |= {"requests_per_s": 1.0, "busy_share": 0.98, "seconds": 3.5}
    report: dict[str, Any] = {"commit": "abcdef0", "environment": facts, "failures": []}
    engine = {**report, "catalog": {"items": 1000}, "floor_tflops": 779, "rows": rows}
    op = {
        **{"op": "beam_attention", "label": "8 x 512 x 1024", "provider": "triton"},
        **{"is_bound": True, "timed_by": "replay", "bound_by": "compute"},
        **{"median_ms": 0.1, "p20_ms": 0.1, "p80_ms": 0.1, "flops": 1.0, "bytes": 1.0},
        **{"flops_per_byte": 1.0, "tflops": 1.0, "gb_per_s": 1.0, "floor_ms": 0.05},
        **{"share_of_floor": 0.5, "error_of_tolerance": 0.1},
    }
    staged = {**op, "provider": "parts", "is_bound": False, "median_ms": 0.3, "p80_ms": 0.4}
    return Results({**engine, "memory": memory, "load": load}, {**report, "rows": [op, staged]})


def write(results: Results, folder: Path) -> None:
    for name, report in ((ENGINE, results.engine), (OPS, results.ops)):
        (folder / name).write_text(json.dumps(report))


def test_committed_results_are_right_or_the_readme_says_that_there_are_none() -> None:
    results = load_results()
    if results is None:
        assert NOTHING in plot_results.README.read_text("utf-8")
    else:
        assert why_wrong(results) == []


def test_the_readme_says_what_the_committed_results_say() -> None:
    assert plot_results.main(["--check"]) == 0


DAMAGES: dict[str, tuple[Callable[[Results], object], str]] = {
    "a row is missing": (lambda r: r.engine["rows"].pop(), "is not measured"),
    "a row is twice there": (lambda r: r.engine["rows"].append(r.engine["rows"][0]), "twice"),
    "a figure is missing": (lambda r: r.engine["rows"][3].pop("memory_mib"), "memory_mib is None"),
    "a figure is no number": (
        lambda r: r.engine["rows"][3].update(median_ms=float("nan")),
        "median_ms is nan",
    ),
    "a median beyond its percentiles": (
        lambda r: r.engine["rows"][3].update(median_ms=1e6),
        "not in order",
    ),
    "a wrong answer": (lambda r: r.engine["rows"][3].update(violations=1), "answers are wrong"),
    "another floor": (lambda r: r.engine["rows"][3].update(floor_ms=0.1), "floor is not 0.1"),
    "an uncommitted tree": (lambda r: r.engine.update(commit="abcdef0+"), "commit is 'abcdef0+'"),
    "a failure": (
        lambda r: r.ops.update(failures=[{"row": "x", "reason": "y"}]),
        "ops: x failed: y",
    ),
    "another device": (
        lambda r: r.ops.update(environment={"device": "L20"}),
        "is not of an H200",
    ),
    "a wrong op": (lambda r: r.ops["rows"][0].update(error_of_tolerance=2.0), "result is wrong"),
    "no load": (lambda r: r.engine.pop("load"), "load is not measured"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen(damage: str) -> None:
    results = made_up()
    assert why_wrong(results) == []
    results = deepcopy(results)
    change, message = DAMAGES[damage]
    change(results)
    assert any(message in why for why in why_wrong(results)), why_wrong(results)


def test_the_section_is_written_and_its_age_noticed(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", made_up()
    readme.write_text(MARKS)
    assert plot_results.main([], readme, tmp_path) == 0
    assert "No run is committed yet" in readme.read_text()
    write(results, tmp_path)
    assert plot_results.main(["--check"], readme, tmp_path) == 1
    assert plot_results.main([], readme, tmp_path) == 0
    assert plot_results.main(["--check"], readme, tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    line = next(
        line for line in text.splitlines() if line.startswith("| qwen3-1.7B | 256 | 5,000 x 8 |")
    )
    assert line.count("| 33% |") == 2
    assert line.endswith("| 33% | FlashRec 882, NVIDIA 307.9 |")
    assert "| 0.100 (0.100-0.100) | 1 TFLOP/s | 50% | by its parts 0.300 |" in text
    results.engine["rows"][0]["median_ms"] *= 1.01
    write(results, tmp_path)
    assert plot_results.main(["--check"], readme, tmp_path) == 1
    results.engine["rows"][0]["violations"] = 1
    write(results, tmp_path)
    assert plot_results.main([], readme, tmp_path) == 1


def test_one_file_without_the_other_is_an_error(tmp_path: Path) -> None:
    (tmp_path / OPS).write_text("{}")
    with pytest.raises(SystemExit, match="without the other"):
        load_results(tmp_path)


def test_the_plot_holds_every_row(tmp_path: Path) -> None:
    (tmp_path / PLOT).write_text(svg(made_up()))
    root = ElementTree.parse(tmp_path / PLOT).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {row.name for row in ROWS} <= texts


def test_a_row_is_compared_with_the_committed_one() -> None:
    before = made_up().engine
    for change, expected in ((1.14, True), (0.86, True), (1.16, False), (0.84, False)):
        now = deepcopy(before)
        for row in now["rows"]:
            row["median_ms"] *= change
        lines, is_good = bench_check.compare(before, now, bench_check.ROW, 0.15)
        assert (len(lines), is_good) == (2, expected)
    assert bench_check.compare(before, {"rows": []}, bench_check.ROW, 0.15)[1] is False
    assert bench_check.compare({"rows": []}, before, bench_check.ROW, 0.15)[1] is False
