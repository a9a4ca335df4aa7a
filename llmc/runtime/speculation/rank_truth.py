"""How often candidates are accepted, by depth and rank, compared with their stated probabilities."""

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float64]

# Candidates that were taken at their word, as it were.
_PRIOR = 8.0


class RankTruth:
    """Counts accepted candidates by depth and rank. depths, ranks: the maximum depth and rank of candidates."""

    def __init__(self, depths: int, ranks: int) -> None:
        # Expected and actual numbers of accepted candidates.
        self._expected: Shares = np.full((depths, ranks), _PRIOR)
        self._true: Shares = np.full((depths, ranks), _PRIOR)

    def likely(self, probabilities: Shares, depth: int = 0) -> Shares:
        """The corrected probabilities of candidates, [depths, ranks]; probabilities: the drafter's, from `depth` on."""
        depths, ranks = probabilities.shape
        places = slice(depth, depth + depths), slice(ranks)
        shares: Shares = np.minimum(probabilities * (self._true[places] / self._expected[places]), 1.0)
        return shares

    def note(self, probabilities: Shares, is_true: npt.NDArray[np.bool_], depth: int = 0) -> None:
        """Record the outcome of candidates whose predecessors were accepted: [depths, ranks] each."""
        depths, ranks = probabilities.shape
        places = slice(depth, depth + depths), slice(ranks)
        self._expected[places] += probabilities
        self._true[places] += is_true
