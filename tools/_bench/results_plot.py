"""The committed engine results as a picture: a bar a row, its floor inside, others as marks; logarithmic milliseconds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tools._bench.engine_rows import ROWS
from tools._bench.results import Results, engine_row
from tools._bench.results_text import OTHERS

if TYPE_CHECKING:
    from collections.abc import Iterator

LEFT, RIGHT, TOP, STEP = 290, 90, 52, 34  # right: room for the name of the last mark
WIDTH, FIGURES = 960, 40  # figures: the column of milliseconds, where no mark can lie on them
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
LEVEL, VOCAB, FLOOR, OTHER = "#2b6cb0", "#90cdf4", "#1a202c", "#c05621"


def svg(results: Results) -> str:
    """The whole file."""
    height = TOP + STEP * len(ROWS) + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    lines = [head, ground, *_legend(), *_axis(results, height)]
    for number, row in enumerate(ROWS):
        top = TOP + STEP * number
        lines.append(_text(LEFT - FIGURES, top + 17, row.name, "end"))
        for place, (normalization, colour) in enumerate((("level", LEVEL), ("vocab", VOCAB))):
            found, y = engine_row(results, row, normalization), top + 4 + 11 * place
            if found is None:
                continue
            start, end = _x(results, _low(results)), _x(results, found["median_ms"])
            lines.append(_rect(start, y, end - start, 9, colour))
            lines.append(_rect(_x(results, found["floor_ms"]) - 1, y - 1, 2, 11, FLOOR))
            lines.append(_text(LEFT - 5, y + 8, f"{found['median_ms']:.1f}", "end", size=9))
        for who, ms in OTHERS.get(row.name, ()):
            x = _x(results, ms)
            lines.append(f'<circle cx="{x:.1f}" cy="{top + 14}" r="4" fill="{OTHER}"/>')
            lines.append(_text(x + 6, top + 18, who, "start", size=9, colour=OTHER))
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> Iterator[str]:
    entries = (("level", LEVEL), ("vocab", VOCAB), ("counted floor", FLOOR), ("others", OTHER))
    for number, (text, colour) in enumerate(entries):
        x = LEFT + 130 * number
        yield _rect(x, 12, 12, 10, colour)
        yield _text(x + 17, 21, text, "start")


def _axis(results: Results, height: int) -> Iterator[str]:
    for tick in TICKS:
        if _low(results) <= tick <= _high(results):
            x = _x(results, tick)
            bottom = height - 30
            yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e2e8f0"/>'
            yield _text(x, height - 14, f"{tick:,}", "middle")
    yield _text(WIDTH - RIGHT, height - 2, "milliseconds of a batch", "end", size=10)


def _low(results: Results) -> float:
    return 0.8 * min(float(row["floor_ms"]) for row in results.engine["rows"])


def _high(results: Results) -> float:
    others = [ms for marks in OTHERS.values() for _, ms in marks]
    return max([*others, *(float(row["median_ms"]) for row in results.engine["rows"])])


def _x(results: Results, ms: float) -> float:
    low, high = _low(results), _high(results)
    share = math.log(ms / low) / math.log(high / low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(
    x: float, y: float, text: str, anchor: str, *, size: int = 12, colour: str = "#1a202c"
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
