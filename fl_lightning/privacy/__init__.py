"""What protects clients: sums of integers, which can be added up in any order, sharded and masked."""

from fl_lightning.privacy.exact_sum import MAX_MAGNITUDE, ExactSum, exact_mean, fraction_bits, largest

__all__ = ["MAX_MAGNITUDE", "ExactSum", "exact_mean", "fraction_bits", "largest"]
