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
from tools._bench.results_targets import targets
from tools._bench.results_text import NOTHING, PLOT, section

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
                    **{"memory_mib": 5.0, "violations": 0, "near_ties": 2, "runs": 8},
                    **{"wall_median_ms": 4 * floor, "checked_requests": min(2, row.requests)},
                }
            )
    facts = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "date": "today"}
    facts |= {"bf16_product_tflops": 1.0, "copy_tb_per_s": 1.0}  # type: ignore[dict-item]
    part = {"model": "qwen3-0.6B", "width": 512, "history": 3000, "requests": 1, "violations": 0}
    start = {"seconds": 30.0, "graphs": 9, "kernels_compiled_before": 0}
    part |= {"commit": "abcdef0", "num_graphs": 9, "start": start}
    memory = {**part, "beyond_weights_mib": 1.0}
    load = {**part, "max_batches_in_flight": 2, "peak_reserved_mib": 1.0}
    load |= {"requests_per_s": 1.0, "busy_share": 0.98, "seconds": 3.5}
    report: dict[str, Any] = {"commit": "abcdef0", "environment": facts, "failures": []}
    report |= {"not_measured": [], "dtype": "bfloat16"}
    checks = [
        {"model": model, "normalization": n, "violations": 0}
        for model in SHAPES
        for n in NORMALIZATIONS
    ]
    engine = {
        **report,
        "reference_checks": checks,
        "catalog": {"items": 1000, "codes": "skewed"},
        "floor_tflops": 779,
        "rows": rows,
    }
    op = {
        **{"op": "beam_attention", "label": "8 x 512 x 1024", "provider": "triton"},
        **{"is_bound": True, "timed_by": "replay", "bound_by": "compute"},
        **{"median_ms": 0.1, "p20_ms": 0.1, "p80_ms": 0.1, "flops": 1.0, "bytes": 1.0},
        **{"flops_per_byte": 1.0, "tflops": 1.0, "gb_per_s": 1.0, "floor_ms": 0.05},
        **{"share_of_floor": 0.5, "error_of_tolerance": 0.1, "runs": 25},
    }
    staged = {**op, "provider": "parts", "is_bound": False, "median_ms": 0.3, "p80_ms": 0.4}
    ops = {**report, "rows": [op, staged], "floor": {"tflops": 779.0, "tb_per_s": 4.24}}
    return Results({**engine, "memory": memory, "load": load}, ops)


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
    "a failure without a reason": (lambda r: r.ops.update(failures=[{"row": "x"}]), "and why"),
    "another dtype": (lambda r: r.engine.update(dtype="float32"), "dtype is 'float32'"),
    "another commit of the ops": (lambda r: r.ops.update(commit="abcdef1"), "different commits"),
    "another commit of a row": (
        lambda r: r.engine["rows"][3].update(commit="abcdef1"),
        "not the report's",
    ),
    "few runs": (lambda r: r.engine["rows"][3].update(runs=4), "4 runs are too few"),
    "few runs of an op": (lambda r: r.ops["rows"][0].update(runs=1), "1 runs are too few"),
    "a row of no table": (lambda r: r.engine["rows"][3].update(row="x"), "x vocab is no row"),
    "other sizes": (lambda r: r.engine["rows"][3].update(width=2), "not those of its name"),
    "busy as no number": (
        lambda r: r.engine["load"].update(busy_share=float("nan")),
        "busy_share is nan",
    ),
    "busy beyond all": (lambda r: r.engine["load"].update(busy_share=1.5), "busy_share is 1.5"),
    "no start": (lambda r: r.engine["memory"].pop("start"), "memory: start: is none"),
    "a reference that the CPU denies": (
        lambda r: r.engine["reference_checks"][1].update(violations=1),
        "does not agree with the CPU",
    ),
    "another device": (
        lambda r: r.ops.update(environment={"device": "L20"}),
        "is not of an H200",
    ),
    "a wrong op": (lambda r: r.ops["rows"][0].update(error_of_tolerance=2.0), "result is wrong"),
    "no load": (lambda r: r.engine.pop("load"), "load: is not measured"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen(damage: str) -> None:
    results = made_up()
    assert why_wrong(results) == []
    results = deepcopy(results)
    change, message = DAMAGES[damage]
    change(results)
    assert any(message in why for why in why_wrong(results)), why_wrong(results)


def test_what_the_run_names_as_without_figure_is_said_and_not_wrong(tmp_path: Path) -> None:
    results = made_up()
    late, failed = ROWS[0].name, "tiny reason | \\n second line"
    results.engine["rows"] = results.engine["rows"][2:]
    results.engine["not_measured"] = [{"row": late, "reason": "no time was left"}]
    results.engine["failures"] = [{"row": "load", "reason": failed}]
    del results.engine["load"]
    assert why_wrong(results) == []
    text = section(results)
    assert f"- no figure, engine: {late}: no time was left" in text
    assert f"| {late} | <= 5.80 ms | - | not measured |" in text
    assert "- no figure, engine: load: tiny reason / " in text
    assert svg(results)


def test_a_missed_target_is_said_and_not_wrong() -> None:
    results = made_up()
    by_what = {target.what: target for target in targets(results)}
    assert by_what["0.6B-w512-h1024-b1"].is_met is False  # three times the floor of 2.8 ms
    assert by_what["0.6B-w512-h1024-b1"].words[2] == "**no**"
    assert by_what["device busy under that load"].words == (">= 97.0%", "98.0%", "yes")
    assert by_what[
        "constrained, rules on, over unconstrained, the larger of both normalisations"
    ].is_met
    assert by_what["attention of a layer, shared, own and merged, 8 x 512 x 1024"].is_met
    unknown = by_what["attention of a layer, shared, own and merged, 8 x 256 x 5000"]
    assert (unknown.is_met, unknown.words[1]) == (None, "-")
    assert sum(target.is_met is False for target in by_what.values()) >= 8
    assert why_wrong(results) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", f"{ENGINE} cannot be read"),
        ("[]", "is no object"),
        ("{}", "rows is no list of objects"),
        ('{"rows": [1]}', "rows is no list of objects"),
        ('{"environment": 3}', "environment is no object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(made_up(), tmp_path)
    (tmp_path / ENGINE).write_text(text)
    with pytest.raises(SystemExit, match=message):
        load_results(tmp_path)


def test_marks_stand_once_and_never_in_the_text() -> None:
    for readme in ("", plot_results.BEGIN, MARKS + plot_results.END):
        with pytest.raises(SystemExit, match="needs the lines"):
            plot_results.with_section(readme, "new")
    with pytest.raises(SystemExit, match="in this order"):
        plot_results.with_section(plot_results.END + plot_results.BEGIN, "new")
    with pytest.raises(SystemExit, match="holds one of the marks"):
        plot_results.with_section(MARKS, f"new {plot_results.END} text")


def test_nothing_is_written_where_the_plot_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(results: Results) -> str:
        raise ValueError("no plot")

    readme = tmp_path / "README.md"
    readme.write_text(MARKS)
    write(made_up(), tmp_path)
    monkeypatch.setattr(plot_results, "svg", fails)
    with pytest.raises(ValueError, match="no plot"):
        plot_results.main([], readme, tmp_path)
    assert readme.read_text() == MARKS


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
    assert line.endswith("| 33% | 795.33 | FlashRec 882, NVIDIA 307.9 |")
    assert "| 0.100 (0.100-0.100) | 1 TFLOP/s | 50% | by its parts 0.300 |" in text
    results.engine["memory"]["start"]["kernels_compiled_before"] = 54
    results.ops["rows"][0].update(dict.fromkeys(("p20_ms", "median_ms", "p80_ms"), 0.00974))
    write(results, tmp_path)
    assert plot_results.main([], readme, tmp_path) == 0
    assert "graphs captured, 54 kernels compiled before" in readme.read_text()
    assert "| 0.0097 (0.0097-0.0097) |" in readme.read_text()
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
    elements = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert {row.name for row in ROWS} <= {element.text for element in elements}
    width = float(root.attrib["viewBox"].split()[2])
    for element in elements:  # a letter is a little over half as wide as it is high
        length = 0.6 * float(element.attrib["font-size"]) * len(element.text or "")
        end = {"start": length, "middle": length / 2, "end": 0}[element.attrib["text-anchor"]]
        assert length - end <= float(element.attrib["x"]) <= width - end


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
    one = {"rows": [row for row in before["rows"] if row["normalization"] == "level"]}
    assert bench_check.compare(before, one, bench_check.ROW, 0.15)[1] is False
    assert bench_check.compare(one, before, bench_check.ROW, 0.15)[1] is False


def test_what_is_committed_is_validated_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the benchmark ran")

    monkeypatch.setattr(bench_check, "FOLDER", tmp_path)
    monkeypatch.setattr("subprocess.run", never)
    results = made_up()

    def said(*arguments: str) -> str:
        assert bench_check.main(arguments) == 2
        return capsys.readouterr().err

    assert "no results are committed" in said()
    write(results, tmp_path)
    assert "takes the name of one row, got '*'" in said("--row", "*")
    results.engine["rows"][0]["violations"] = 1
    write(results, tmp_path)
    assert "1 answers are wrong" in said()
    write(made_up(), tmp_path)
    with pytest.raises(AssertionError, match="the benchmark ran"):
        bench_check.main([])
