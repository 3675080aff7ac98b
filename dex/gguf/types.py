"""The types that the matrices of a file can have."""

from __future__ import annotations

from typing import NamedTuple

import gguf


class FileType(NamedTuple):
    """A type of the matrices, and what a file is called whose matrices have it."""

    matrices: gguf.GGMLQuantizationType
    file: gguf.LlamaFileType


F32 = gguf.GGMLQuantizationType.F32
F16 = gguf.GGMLQuantizationType.F16
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# By the name that --type has for it.
TYPES = {
    "f16": FileType(F16, gguf.LlamaFileType.MOSTLY_F16),
    "f32": FileType(F32, gguf.LlamaFileType.ALL_F32),
    "q8_0": FileType(Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
