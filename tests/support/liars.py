"""Clients of a secure sum that lie."""

from __future__ import annotations

import pytest

pytest.importorskip("Crypto")

from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.primitives import private_key

LIAR, LIES_IN = 2, 2


def more(place: int, units: int):
    def lie(vector):
        vector = vector.clone()
        vector[place] += units
        return vector

    return lie


def clients_with_a_liar(lie=None, *, flips_key: bool = False) -> type[SecureClient]:
    """A class of clients, of whom one lies in one round."""
    rounds = []

    class Clients(SecureClient):
        def __init__(self, id, *details):
            super().__init__(id, *details)
            rounds.extend([id] if id == LIAR else [])
            self.lies = id == LIAR and len(rounds) == LIES_IN

        def keys(self):
            if not (self.lies and flips_key):
                return super().keys()
            masks, self.mask_key = self.mask_key, private_key(bytes(16))
            advertised = super().keys()
            self.mask_key = masks
            return advertised

        def masked(self, vector):
            return super().masked(lie(vector) if self.lies and lie else vector)

    return Clients
