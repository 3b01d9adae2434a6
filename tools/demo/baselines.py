"""The two yardsticks beside the model: popularity and Markov-1.

Both are counted on the sequences they are given and neither ever recommends an item of the user's
own history. Ties are broken by popularity, then by the smaller item id, so the lists are fixed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def popularity_ranking(sequences: Mapping[int, Sequence[int]]) -> list[int]:
    """Items that occur in the sequences: most interactions first, then smaller id first."""
    counts = Counter(item for items in sequences.values() for item in items)
    return sorted(counts, key=lambda item: (-counts[item], item))


def popularity_recommend(
    ranking: Sequence[int], history: Sequence[int], num_results: int = 10
) -> list[int]:
    """The first `num_results` items of the ranking that are not in the history."""
    seen = set(history)
    return [item for item in ranking if item not in seen][:num_results]


class Markov1:
    """Ranks by how often an item directly followed the history's last one, then by popularity."""

    def __init__(self, sequences: Mapping[int, Sequence[int]]) -> None:
        self.ranking = popularity_ranking(sequences)
        place = {item: rank for rank, item in enumerate(self.ranking)}
        followers: dict[int, Counter[int]] = {}
        for items in sequences.values():
            for item, follower in itertools.pairwise(items):
                followers.setdefault(item, Counter())[follower] += 1
        self.followers: dict[int, list[int]] = {}
        for item, counts in followers.items():
            by_place = sorted(counts, key=place.__getitem__)
            self.followers[item] = sorted(by_place, key=counts.__getitem__, reverse=True)

    def recommend(self, history: Sequence[int], num_results: int = 10) -> list[int]:
        """Followers of the last item, filled up from the popularity ranking; history left out."""
        followers = self.followers.get(history[-1], []) if history else []
        candidates = dict.fromkeys([*followers, *self.ranking])
        return popularity_recommend(list(candidates), history, num_results)
