"""The former place of the averages, by which configurations name them."""

from fl_lightning.aggregation.averages import (
    WEIGHTED_MEAN,
    CoordinateMedian,
    NormClipping,
    TrimmedMean,
    WeightedMean,
)

__all__ = ["WEIGHTED_MEAN", "CoordinateMedian", "NormClipping", "TrimmedMean", "WeightedMean"]
