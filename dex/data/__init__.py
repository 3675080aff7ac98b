"""Text → packed training blocks and held-out documents.

`prepare` reads sources, splits off the held-out documents, encodes the others and cuts them into blocks on disk.
"""

from dex.data.calibrate import Calibration, calibration
from dex.data.held_out import HeldOut, HeldOutBlock, is_held_out
from dex.data.packing import IGNORED, Packed, RunOrder
from dex.data.prepare import Prepared, prepare
from dex.data.sources import Document, Skipped, Source, read_documents
from dex.data.tokens import encode_documents

__all__ = [
    "IGNORED",
    "Calibration",
    "Document",
    "HeldOut",
    "HeldOutBlock",
    "Packed",
    "Prepared",
    "RunOrder",
    "Skipped",
    "Source",
    "calibration",
    "encode_documents",
    "is_held_out",
    "prepare",
    "read_documents",
]
