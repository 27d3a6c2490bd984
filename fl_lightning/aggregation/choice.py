"""Which of the four ways a run takes from uploads to the next state."""

from __future__ import annotations

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.aggregation.masked import MaskedSum
from fl_lightning.aggregation.plain import PlainSum
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.aggregation.private_sum import PrivateSum
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.single import SingleUploads
from fl_lightning.privacy.secure.settings import SecureSum


def choose_aggregation(
    method: SummingServer,
    masks: SecureSum | None = None,
    privacy: PrivateAggregation | None = None,
    *,
    single: bool = False,
) -> Aggregation:
    """Return how a run with these settings aggregates. Whether they fit the method is checked
    elsewhere.

    Args:
        method: the server's half.
        masks: ``trainer.secure_sum``.
        privacy: what makes sums private, of ``trainer.privacy``.
        single: whether uploads are read one by one also where the method needs sums alone.
    """
    if privacy is None and masks is None and (single or not method.is_sum):
        return SingleUploads(method)
    sums = PlainSum(method) if privacy is None else PrivateSum(method, privacy)
    return sums if masks is None else MaskedSum(sums, masks)
