"""How each method is made of a golden file's settings and read, and what a planted fault
changes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from golden_cases import (
    Adapter,
    averaging,
    cases_of,
    differences,
    run_case,
)

from fl_lightning import methods
from fl_lightning.topology import Complete, Exponential, Gossip, Graph, Moshpit, Ring


def dynamic(kind):
    """Clients of FedDyn count once each; ``weights`` of a file is what a_i goes by."""
    return lambda weigh_by, **settings: kind(alpha_by=weigh_by, **settings)


def with_head(method, client):
    """The file's personal models end with P, which is added to the last layer where the model is
    deployed."""
    return torch.cat([method.server["weights"], method.kept(client, "P")])


OF_TOPOLOGY = {"mixing", "side", "dims", "averaging_rounds"}


class Matrix(Graph):
    """W as a file has it."""

    def __init__(self, rows):
        self.rows = rows

    def mixing(self, peers, seed, round):
        return {
            i: {j: Fraction(w) for j, w in enumerate(row) if w} for i, row in enumerate(self.rows)
        }


def gossip(settings):
    """In the files a peer takes from itself what it could not take from one who is away."""
    named = {"ring": Ring, "complete": Complete, "one_peer_exponential": Exponential}
    mixing = settings["mixing"]
    return Gossip(named[mixing]() if isinstance(mixing, str) else Matrix(mixing), push_sum=False)


def moshpit(settings):
    return Moshpit(settings["side"], settings["dims"], settings.get("averaging_rounds", 1))


def of_peers(topology):
    """FedAvg over a topology, whose peers weigh alike."""

    def make(**settings):
        return methods.FedAvg(
            **{key: value for key, value in settings.items() if key not in OF_TOPOLOGY}
        )

    def personal(method, client):
        return method.server[f"peer/{client.id}/weights"]

    return Adapter(make=make, weights="uniform", topology=topology, personal=personal)


MOMENTS = {"m": "optimizer/first_moment", "v": "optimizer/second_moment"}


ADAPTERS: dict[str, Adapter] = {
    "FedAvg": Adapter(),
    "FedProx": Adapter(),
    "FedAvgM": Adapter(state={"v": "optimizer/velocity"}),
    "FedAdam": Adapter(state=MOMENTS),
    "FedYogi": Adapter(state=MOMENTS),
    "FedAdagrad": Adapter(state=MOMENTS),
    "FedExP": Adapter(state={"gain": "optimizer/gain"}),
    "FedACG": Adapter(server="optimizer/evaluated", state={"M": "optimizer/momentum"}),
    "SCAFFOLD": Adapter(weights="uniform", state={"c": "c"}, kept={"c_i": "c_i"}),
    "FedDyn": Adapter(
        make=dynamic(methods.FedDyn), weights="uniform", state={"H": "H"}, kept={"H_i": "H_i"}
    ),
    "FedDC": Adapter(
        make=dynamic(methods.FedDC),
        weights="uniform",
        state={"G": "G"},
        kept={"h_i": "H_i", "g_i": "g_i"},
    ),
    "FedNova": Adapter(state={"B": "momentum"}),
    "FedSAM": Adapter(),
    "FedCM": Adapter(weights="uniform", state={"M": "M"}),
    "MoFedSAM": Adapter(weights="uniform", state={"M": "M"}),
    "FedLC": Adapter(),
    "MOON": Adapter(kept={"previous": "previous_weights"}),
    "APFL": Adapter(kept={"v": "v", "A": "A"}),
    "FedALA": Adapter(kept={"v": "v", "W": "W"}),
    "FedProto": Adapter(state={"P": "prototypes", "known": "known"}, kept={"weights": "weights"}),
    "FedRoD": Adapter(kept={"P": "P"}, personal=with_head),
    "Ditto": Adapter(kept={"v": "v"}),
    "FineTune": Adapter(),
    "FedPer": Adapter(kept={"local": "personal"}),
    "FedRep": Adapter(kept={"local": "personal"}),
    "FedBABU": Adapter(),
    "FedBN": Adapter(kept={"local": "personal"}),
    "LocalOnly": Adapter(kept={"weights": "weights"}),
    "Bulyan": averaging(methods.Bulyan),
    "CenteredClipping": averaging(methods.CenteredClipping, state={"v": "last_update/weights"}),
    "FLTrust": averaging(methods.FLTrust),
    "GeometricMedian": averaging(methods.GeometricMedian, tolerance=0.0),
    "Krum": averaging(methods.Krum),
    "MultiKrum": averaging(methods.MultiKrum),
    "Gossip": of_peers(gossip),
    "Moshpit": of_peers(moshpit),
}
"""How each method is made of a file's settings and read, by the method that the file names."""


def found_by_a_file(fault, folder):
    """Return where a class that differs from its base by a mistake differs from the base's file."""
    own = fault.__mro__[1]
    name, found = own.__name__, []
    made = ADAPTERS[name].make or own
    for case in cases_of(name):

        def make(**settings):
            method = made(**settings)
            method.__class__ = fault
            return method

        after = run_case(name, replace(ADAPTERS[name], make=make), case, folder)
        found += differences(case["after"], after, tolerance=1e-3)
    return found
