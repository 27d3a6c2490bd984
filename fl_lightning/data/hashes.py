"""What tells the data of one run from those of another."""

from __future__ import annotations

from fl_lightning.data.base import FederatedData
from fl_lightning.data.test_owners import owners_sha256


def hashes_of(data: FederatedData) -> dict[str, str]:
    """Return what data rest on beside their settings, each as a SHA-256: who holds which examples
    (``partition``), the examples of data of one's own (``content``), the tokens that text has
    become (``tokens``), what data of one's own say of the clients and groups of test examples
    (``test_owners``), and a public set of other data (``public``); without those that data do not
    have."""
    found = {
        "partition": data.partition_hash,
        "content": data.content_sha256,
        "tokens": data.tokens_sha256,
        "test_owners": owners_sha256(data),
        "public": data.public_sha256,
    }
    return {name: value for name, value in found.items() if value}
