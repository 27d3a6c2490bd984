"""The methods that runs with a secure sum are compared with plain ones of, and their settings."""

from __future__ import annotations

from typing import Any

from toy import sgd

from fl_lightning.methods import NormClipping

METHODS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "FedAvg",
            "FedProx",
            "FedNTD",
            "FedLC",
            "MOON",
            "Ditto",
            "FedRoD",
            "FedALA",
            "FineTune",
            "FedPer",
            "FedRep",
            "FedBABU",
            "FedBN",
            "LGFedAvg",
            "QFedAvg",
            "AQFL",
            "FedPQ",
            "FedMPQ",
            "FedMPQKD",
        )
    },
    **{name: {"optimizer": sgd(0.05)} for name in ("SCAFFOLD", "FedDyn", "FedNova", "FedSAM")},
    **{
        name: {"optimizer": sgd(0.05)}
        for name in ("APFL", "FedCM", "MoFedSAM", "FedDC", "FedSpeed")
    },
    "NormClipping": {"average": NormClipping(0.05)},
}
