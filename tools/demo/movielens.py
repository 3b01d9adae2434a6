"""MovieLens-100k, read as files out of the installed recbole wheel.

The data's licence forbids redistribution, so nothing of it is kept in the repository: the wheel on
the package index carries the files, and they are read in place. recbole itself is never imported
(its dependencies need not be installed); only its location is looked up.

Order: a user's interactions are sorted by timestamp, then by item id. Many sessions rate several films
within one second (for 415 of the 943 users the last timestamp is shared), so the rule for ties decides
who is the last item, and it moves the baselines: Recall@10 of popularity and Markov-1 is 0.050 and 0.148
with this rule, 0.086 and 0.145 with the file's own order. The rule is the same for all rows of a table.

Split of a user's sequence, used everywhere in the demo:
  items[:-2] trains the candidates,  items[-2] chooses among them (validation),
  items[:-1] trains what is kept,    items[-1] is looked at once (test).
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from .errors import DemoError

RECBOLE_VERSION = "1.2.1"
INSTALL_COMMAND = f"pip install --no-deps recbole=={RECBOLE_VERSION}"
INTERACTION_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
ITEM_HEADER = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"


def data_folder() -> Path:
    """Folder of the ml-100k files inside the installed wheel. Raises DemoError if absent."""
    try:
        wheel = importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        raise DemoError(
            f"the demo reads MovieLens-100k out of the recbole wheel, which is not installed; "
            f"run `{INSTALL_COMMAND}`"
        ) from None
    if wheel.version != RECBOLE_VERSION:
        raise DemoError(
            f"the demo expects recbole {RECBOLE_VERSION}, got {wheel.version}; "
            f"run `{INSTALL_COMMAND}`"
        )
    folder = Path(str(wheel.locate_file("recbole/dataset_example/ml-100k")))
    for name in ("ml-100k.inter", "ml-100k.item"):
        if not (folder / name).is_file():
            raise DemoError(
                f"expected {name} in {folder}, found none; "
                f"run `{INSTALL_COMMAND} --force-reinstall`"
            )
    return folder


def _read_rows(path: Path, header: str) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != header:
        raise DemoError(f"{path}: expected the header {header!r}, got {lines[:1]!r}")
    num_columns = header.count("\t") + 1
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != num_columns:
            raise DemoError(f"{path}:{number}: expected {num_columns} columns, got {len(row)}")
    return rows


def load_sequences() -> dict[int, list[int]]:
    """user id -> item ids, oldest first; users in ascending order of id, 943 of them."""
    timed: dict[int, list[tuple[float, int]]] = {}
    for user, item, _rating, timestamp in _read_rows(
        data_folder() / "ml-100k.inter", INTERACTION_HEADER
    ):
        timed.setdefault(int(user), []).append((float(timestamp), int(item)))
    return {user: [item for _, item in sorted(timed[user])] for user in sorted(timed)}


def load_titles() -> dict[int, str]:
    """item id -> title with the release year, ascending by id, 1,682 of them."""
    titles = {}
    for item, title, year, _genres in _read_rows(data_folder() / "ml-100k.item", ITEM_HEADER):
        titles[int(item)] = f"{title} ({year})" if year.isdigit() else title
    return dict(sorted(titles.items()))


def without_last(sequences: dict[int, list[int]], num_held_out: int) -> dict[int, list[int]]:
    """Every user's sequence without its last `num_held_out` (1 = test, 2 = validation) items."""
    if num_held_out not in (1, 2):
        raise ValueError(f"num_held_out must be 1 or 2, got {num_held_out}")
    return {user: items[:-num_held_out] for user, items in sequences.items()}
