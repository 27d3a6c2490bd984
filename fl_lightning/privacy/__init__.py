"""What protects clients: sums of integers, which can be added up in any order, sharded and masked; clipping,
noise and its accounting."""

from fl_lightning.privacy.accounting import RoundAccountant
from fl_lightning.privacy.clipping import clip_together, rounding_length
from fl_lightning.privacy.exact_sum import MAX_MAGNITUDE, ExactSum, exact_mean, fraction_bits, largest
from fl_lightning.privacy.noise import discrete_gaussian, rounded_gaussian
from fl_lightning.privacy.randomness import Generator, Randomness, SystemGenerator, from_system
from fl_lightning.privacy.settings import ClientPrivacy

__all__ = [
    "MAX_MAGNITUDE",
    "ClientPrivacy",
    "ExactSum",
    "Generator",
    "Randomness",
    "RoundAccountant",
    "SystemGenerator",
    "clip_together",
    "discrete_gaussian",
    "exact_mean",
    "fraction_bits",
    "from_system",
    "largest",
    "rounded_gaussian",
    "rounding_length",
]
