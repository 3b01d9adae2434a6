"""Teacher-forced scores for `assert_same_answer`, prefetched: which prefixes it will ask for, and what follows them.

The helper itself decides, in a process of its own without torch. It asks a scorer for the children of prefixes, and the
scorer is a model on a device; so the prefixes it can ask for are found here first: the possible ones and those the run kept,
computed over whole arrays. A prefix that was not foreseen is an error there, never a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tools._bench.answer_check import LevelScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tools._bench.plain_decoder import PlainDecoder, Read
    from tools._bench.sid_catalog import Prefixes

ROWS_OF_VOCABULARY = 512  # rows whose logits over the whole vocabulary are held at once


class LevelScorer:
    """Log-probabilities of codes behind prefixes of one history, normalised over the level or the whole vocabulary."""

    def __init__(
        self,
        decoder: PlainDecoder,
        read: Read,
        prefixes: Prefixes,
        first_token: int,
        *,
        is_vocab: bool,
    ) -> None:
        self._decoder, self._read, self._prefixes = decoder, read, prefixes
        self._first_token, self._is_vocab = first_token, is_vocab

    def children(
        self, packed: NDArray[np.int64], length: int
    ) -> tuple[LevelScores, NDArray[np.int64]]:
        """What follows packed prefixes of `length` codes, and the packed children in the same order."""
        counts, children = self._prefixes.children(packed, length)
        num_codes = self._prefixes.num_codes
        row = torch.from_numpy(np.repeat(np.arange(len(packed)), counts))
        code = torch.from_numpy(children % num_codes)
        log_probs = self._log_probs(self._prefixes.codes_of(packed, length), row, code)
        starts = np.concatenate([[0], np.cumsum(counts)])
        codes = self._prefixes.codes_of(packed, length)
        return LevelScores(codes, starts, children % num_codes, log_probs), children

    def scores_of(self, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        """The score of each prefix [n, length], whether the catalogue has it or not."""
        scores = np.zeros(len(codes))
        for level in range(codes.shape[1]):
            unique, row = np.unique(codes[:, :level], axis=0, return_inverse=True)
            if not level:
                unique, row = np.zeros((1, 0), np.int64), np.zeros(len(codes), np.int64)
            last = torch.from_numpy(codes[:, level].copy())
            scores += self._log_probs(unique, torch.from_numpy(row.reshape(-1)), last)
        return scores

    def best_of_all(
        self, codes: NDArray[np.int64], width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of all continuations of prefixes [n, length], in a catalogue or not, the best: codes and scores, best first."""
        log_probs = self._all_log_probs(codes)
        scores = log_probs + torch.from_numpy(self.scores_of(codes)).to(log_probs)[:, None]
        top = scores.flatten().topk(min(width, scores.numel()))
        place = top.indices.cpu().numpy()
        row, code = np.divmod(place, self._prefixes.num_codes)
        best = np.concatenate([codes[row], code[:, None]], axis=1)
        return best, top.values.double().cpu().numpy()

    def _log_probs(
        self, codes: NDArray[np.int64], row: torch.Tensor, code: torch.Tensor
    ) -> NDArray[np.float64]:
        log_probs = self._all_log_probs(codes)
        place = log_probs.device
        return log_probs[row.to(place), code.to(place)].double().cpu().numpy()

    def _all_log_probs(self, codes: NDArray[np.int64]) -> torch.Tensor:
        """Of every code behind each prefix [n, length]."""
        decoder, level, num_codes = self._decoder, codes.shape[1], self._prefixes.num_codes
        device = decoder.head_VM.device
        hidden = self._read.hidden_M[None]
        if level:
            tokens = codes + self._first_token + num_codes * np.arange(level)
            hidden = decoder.continue_from(self._read, torch.from_numpy(tokens).to(device))
        first = self._first_token + num_codes * level
        logits = hidden @ decoder.head_VM[first : first + num_codes].T
        read = torch.split(hidden, ROWS_OF_VOCABULARY) if self._is_vocab else ()
        lse = (
            torch.cat([(part @ decoder.head_VM.T).logsumexp(1) for part in read])
            if self._is_vocab
            else logits.logsumexp(1)
        )
        return logits.sub_(lse[:, None])


def foresee(
    scorer: LevelScorer,
    num_levels: int,
    widths: Sequence[int],
    t: float,
    kept: Sequence[NDArray[np.int64]],
) -> list[LevelScores]:
    """The scores of every prefix that the helper can ask for.

    kept: per level the packed prefixes that the run's own beams had after that level.
    """
    scores = [np.zeros(1)]
    packed = np.zeros(1, np.int64)
    is_possible = is_certain = np.ones(1, bool)
    found = []
    for level in range(num_levels):
        behind, children = scorer.children(packed, level)
        found.append(behind)
        counts = np.diff(behind.starts)
        score = np.repeat(scores[-1], counts) + behind.log_probs
        under_possible, under_certain = (
            np.repeat(is_possible, counts),
            np.repeat(is_certain, counts),
        )
        of_certain, of_possible = np.sort(score[under_certain]), np.sort(score[under_possible])
        num_above = len(of_certain) - np.searchsorted(of_certain, score + 2 * t, side="right")
        num_near = len(of_possible) - np.searchsorted(of_possible, score - 2 * t) - 1
        is_possible = under_possible & (num_above < widths[level])
        is_certain = under_certain & (num_near < widths[level])
        is_needed = is_possible | np.isin(children, kept[level])
        packed, is_possible = children[is_needed], is_possible[is_needed]
        is_certain = is_certain[is_needed]
        scores.append(score[is_needed])
    return found
