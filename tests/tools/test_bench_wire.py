"""The wire benchmark compares equal content and reports what it says."""

import json

import pytest

from tools import bench_wire


def test_both_forms_hold_the_same_rows() -> None:
    for num_items in (0, 1, 7):
        bench_wire.assert_same_rows(
            bench_wire.random_result(num_items, 3), bench_wire.repeated_form()
        )


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_wire.main(["--items", "512", "--runs", "9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_items"], report["num_levels"], report["runs"]) == (512, 3, 9)
    # 24 bytes a row and a few header fields.
    assert 512 * 24 < report["arrays_bytes"] < 512 * 24 + 100
    assert report["arrays_us"]["p20"] <= report["arrays_us"]["median"] <= report["arrays_us"]["p80"]
    # The smallest ratio the design relies on is 50; far below it, something copies rows one by one.
    assert report["repeated_ratio_to_arrays"] > 10
