"""What protects clients: clipping, noise and its accounting; and ``secure``, sums of which a server
learns nothing but the total."""

from fl_lightning.privacy.accounting import RoundAccountant
from fl_lightning.privacy.begun import NoisySums
from fl_lightning.privacy.clipping import clip_together, rounding_length
from fl_lightning.privacy.noise import discrete_gaussian, rounded_gaussian
from fl_lightning.privacy.randomness import Generator, Randomness, SystemGenerator, from_system
from fl_lightning.privacy.settings import ClientPrivacy
