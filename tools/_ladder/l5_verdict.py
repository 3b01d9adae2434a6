"""What the end of a compilation for Ascend without CANN means. Text in, verdict out: no compiler is needed here."""

from __future__ import annotations

import re

# Printed at the start too, where its version is asked for; the second text comes only when everything before it is done.
HIVMC_MISSING = ("Cannot find hivmc under $PATH", "External hivmc run fails")
LAST_MODULE = "module.hivm.opt.mlir"
ELEMENT_LOOP = re.compile(r"^(\s*)} \{.*ExtractedLoadOrStore")
ELEMENT_ACCESS = re.compile(r"memref\.store|memref\.load .*: memref<1x")


def verdict(log: str, last_module: str | None) -> str | None:
    """Why an end is not the accepted one, or None. last_module: what hivmc would have compiled, None if there is none."""
    if "set enable-auto-multi-buffer to false" in log:
        return "fits into the unified buffer without overlap of copies and work only, or not at all"
    if last_module is None:
        return f"no {LAST_MODULE}: {first_lines(log)}"
    if not all(text in log for text in HIVMC_MISSING):
        return f"ended otherwise than at the missing hivmc: {first_lines(log)}"
    loop = element_loop(last_module)
    return f"reads or writes element by element: {loop}" if loop else None


def element_loop(module: str) -> str | None:
    """The first access of a loop that moves one element a turn; a loop that moves a row a turn is none."""
    lines = module.splitlines()
    for end, line in enumerate(lines):
        closing = ELEMENT_LOOP.match(line)
        if closing is None:
            continue
        opening = re.compile(rf"{closing.group(1)}(%\S+ = )?scf\.for")
        start = max(n for n in range(end) if opening.match(lines[n]))
        for inner in lines[start:end]:
            if ELEMENT_ACCESS.search(inner):
                return inner.strip()[:120]
    return None


def first_lines(text: str) -> str:
    """What of a log tells most: the lines of errors beside those about hivmc."""
    lines = [line for line in text.splitlines() if line.strip() and "hivmc" not in line]
    return " | ".join(lines[:4])[:600]
