"""Who is asked to take part in a round: samplers, which know what a server would know and nothing
else."""

from fl_lightning.sampling.base import Sampler, ServerView, Uniform
from fl_lightning.sampling.oort import Oort
from fl_lightning.sampling.power_of_choice import PowerOfChoice
