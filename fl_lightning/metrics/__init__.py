from fl_lightning.metrics.calibration import (
    CalibrationBins,
    brier_score,
    calibration_bins,
    expected_calibration_error,
)
from fl_lightning.metrics.declared import Metric
from fl_lightning.metrics.mean import Mean
from fl_lightning.metrics.spread import client_spread
from fl_lightning.metrics.summary import auc_accuracy, final_summary
