"""Payloads between clients and server, their encoding as bytes, and the ledger of these bytes."""

from fl_lightning.wire.codes import Codes
from fl_lightning.wire.layout import Layout
from fl_lightning.wire.ledger import Ledger, LedgerEntry
from fl_lightning.wire.payload import Axis, Limit, OptionalShape, Payload, PayloadError
from fl_lightning.wire.rows import encode_rows
