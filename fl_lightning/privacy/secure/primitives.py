"""The primitives of a secure sum, each of a kept library: X25519, HKDF, AES-GCM and ChaCha20 of
``cryptography``, Shamir's secret sharing of ``pycryptodome``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_lightning.errors import ThreePartError

SEED_BYTES, KEY_BYTES, TAG_BYTES = 16, 32, 16
BLOCK_VALUES = 2**15
"""Values of a mask that are made at once: a quarter of a megabyte, which stays in a core's
cache."""

ZEROS = bytes(8 * BLOCK_VALUES)
ONCE = bytes(12)
"""The nonce of AES-GCM: every key seals one envelope."""


class ProtocolError(ThreePartError, ValueError):
    """A message that no honest party sends; whoever gets it takes no further part in the round."""


def derived_key(secret: bytes, purpose: str) -> bytes:
    """Return 32 bytes that follow from a secret and what they are for (HKDF with SHA-256)."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(secret)


def private_key(seed: bytes) -> X25519PrivateKey:
    """Return the X25519 key of a seed of 16 bytes, which is what a share can hold."""
    return X25519PrivateKey.from_private_bytes(derived_key(seed, "x25519"))


def public_key(private: X25519PrivateKey) -> bytes:
    """Return the public half of a key, 32 bytes."""
    return private.public_key().public_bytes_raw()


def agreed_key(private: X25519PrivateKey, public: bytes, purpose: str) -> bytes:
    """Return the key of 32 bytes that two clients have in common.

    Raises:
        ProtocolError: the public key is none.
    """
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(
            "a public key of low order", str(error), "advertise an X25519 key"
        ) from None
    return derived_key(secret, purpose)


def point_of(public: bytes) -> bytes:
    """Return what is the same of two public keys that give everybody the same secret, as several
    that are written differently do.

    Raises:
        ProtocolError: the key is of low order, and gives no secret.
    """
    return agreed_key(private_key(bytes(SEED_BYTES)), public, "check")


def fingerprint(secret: bytes) -> bytes:
    """Return the SHA-256 of a random secret, which says whether a reconstructed one is the same."""
    digest = Hash(SHA256())
    digest.update(secret)
    return digest.finalize()


def seal(key: bytes, data: bytes) -> bytes:
    """Return data in an envelope (AES-GCM) of ``len(data) + 16`` bytes. A key seals once."""
    return AESGCM(key).encrypt(ONCE, data, None)


def open_envelope(key: bytes, envelope: bytes) -> bytes:
    """Return what is in an envelope.

    Raises:
        ProtocolError: it was sealed with another key, or damaged.
    """
    try:
        return AESGCM(key).decrypt(ONCE, envelope, None)
    except InvalidTag:
        raise ProtocolError(
            "an envelope that cannot be opened",
            "its sender sealed it for its receiver",
            "leave the round",
        ) from None


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return ``count`` shares of a secret of 16 bytes, of which any ``threshold`` reconstruct it
    and fewer say nothing (Shamir, 1979, over GF(2^128)). The coefficients come from the operating
    system."""
    return [share for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of as many shares as its threshold, by their position in what :func:`split`
    gave."""
    numbered = [(position + 1, share) for position, share in sorted(shares.items())]
    return Shamir.combine(numbered, ssss=False)


def add_mask(vector: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add or subtract the mask of a key, the key stream of ChaCha20, in place and modulo 2^64.

    Args:
        vector: uint64 ``[L]``.
        key: 32 bytes, of this mask alone.
        sign: 1 or -1.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    buffer = bytearray(8 * BLOCK_VALUES)
    mask = np.frombuffer(buffer, "<u8")
    add = np.add if sign == 1 else np.subtract
    for begin in range(0, len(vector), BLOCK_VALUES):
        block = vector[begin : begin + BLOCK_VALUES]
        stream.update_into(ZEROS[: 8 * len(block)], buffer)
        add(block, mask[: len(block)], out=block)
