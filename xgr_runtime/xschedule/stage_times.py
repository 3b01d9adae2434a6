"""How long the stages of one batch took, as plain data. `stage_clock` measures it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """Seconds. rounds_s and selects_s: by group and round; a round is the model's step (none in round 0), the head, the
    selection and the reorder of the beams' own KV, and its selection alone is the round's part in selects_s.
    all_rounds_s: by group, all of its rounds.

    A round and a selection have None where the next batch in flight had begun the same graph before this one's times were
    read, a selection also where the device cannot time inside of its graphs. Every other time is always known.

    to_device_s: inputs, rule rows and exclusions of all groups. to_host_s: the outcomes. Both run beside other batches.
    span_s: from the first copy to the end of the last one, with whatever the device waited for in between and, where
    several batches are in flight, the rest of the batch before.
    """

    to_device_s: float = 0.0
    prefill_s: float = 0.0
    rounds_s: tuple[tuple[float | None, ...], ...] = ()
    selects_s: tuple[tuple[float | None, ...], ...] = ()
    to_host_s: float = 0.0
    span_s: float = 0.0
    all_rounds_s: tuple[float, ...] = ()
