"""When the device will be free: what the forecast says of batches whose times are known, against sums by hand."""

import math

import numpy as np

from xgr_runtime.xschedule.batch import Batch, RuleRow, SearchGroup, pack_histories
from xgr_runtime.xschedule.forecast import Forecast
from xgr_runtime.xschedule.stage_times import StageTimes


def batch_of(num_histories: int) -> Batch:
    histories = pack_histories(
        [np.zeros(4, dtype=np.int64)] * num_histories, [[1]] * num_histories, 4
    )
    group = SearchGroup(
        slot_index=0,
        catalog_version="v",
        normalization="vocab",
        history_of_S=np.arange(num_histories, dtype=np.int32),
        widths_SL=np.full((num_histories, 2), 8, dtype=np.int32),
        rules=(RuleRow(0, None, ()),) * num_histories,
        rule_loads=(),
    )
    return Batch(1, "full", ("r",) * num_histories, histories, (group,))


def times_of(seconds: float) -> StageTimes:
    return StageTimes(prefill_s=seconds / 4, all_rounds_s=(seconds / 2, seconds / 4))


def test_sizes_that_never_ran_are_done_at_once() -> None:
    forecast = Forecast()
    forecast.issued(batch_of(1), 10.0)
    assert forecast.end_s() == forecast.oldest_end_s() == 10.0


def test_batches_follow_each_other() -> None:
    forecast = Forecast()
    for number, seconds in ((1, 2.0), (4, 8.0)):
        forecast.issued(batch_of(number), 0.0)
        forecast.ended(1.0, times_of(seconds))
    forecast.issued(batch_of(4), 100.0)
    forecast.issued(batch_of(1), 101.0)
    assert (forecast.oldest_end_s(), forecast.end_s()) == (108.0, 110.0)
    forecast.ended(109.0, None)  # it says nothing about others, yet it has ended
    assert (forecast.oldest_end_s(), forecast.end_s()) == (111.0, 111.0)
    forecast.ended(111.0, times_of(2.0))
    forecast.issued(batch_of(4), 200.0)
    assert forecast.end_s() == 208.0


def test_the_usual_time_follows_what_is_measured() -> None:
    forecast = Forecast()
    for _ in range(40):
        forecast.issued(batch_of(1), 0.0)
        forecast.ended(0.0, times_of(1.0))
    for _ in range(40):
        forecast.issued(batch_of(1), 0.0)
        forecast.ended(0.0, times_of(3.0))
    forecast.issued(batch_of(1), 0.0)
    assert 2.9 < forecast.end_s() < 3.0


def test_what_is_forgotten_is_expected_at_once() -> None:
    forecast = Forecast()
    forecast.issued(batch_of(1), 0.0)
    forecast.ended(0.0, times_of(4.0))
    forecast.forget()
    forecast.issued(batch_of(1), 10.0)
    assert forecast.end_s() == 10.0


def test_a_time_that_is_no_number_is_no_time() -> None:
    forecast = Forecast()
    for seconds in (4.0, math.nan, math.inf):
        forecast.issued(batch_of(1), 0.0)
        forecast.ended(0.0, times_of(seconds))
    forecast.issued(batch_of(1), 0.0)
    assert forecast.end_s() == 4.0
