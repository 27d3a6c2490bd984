"""What may befall a client and its upload."""

from __future__ import annotations

from dataclasses import replace

import torch

from fl_lightning.hooks import Stressor


class Fates(Stressor):
    """Client 1 never begins in round 2; the upload of client 2 is lost in round 3, that of client 3
    is not finite in round 4."""

    def change_cohort(self, cohort, *, round, context):
        def fate(a):
            if (round, a.client.id) == (2, 1):
                return replace(a, trains=False, returns=False)
            return replace(a, returns=False) if (round, a.client.id) == (3, 2) else a

        return [fate(assignment) for assignment in cohort]

    def change_upload(self, upload, *, client, round, context):
        if (round, client.id) != (4, 3):
            return upload
        weights = torch.full_like(upload.tensor("weights"), float("nan"))
        return type(upload)({**upload, "weights": weights})
