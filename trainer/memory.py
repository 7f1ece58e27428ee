"""How much memory the ranks have taken."""

import resource

from towline.trainer.rank_sums import rank_largest


def peak_gib() -> float:
    """Largest resident memory of a rank so far, GiB. Every rank must call it."""
    return rank_largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
