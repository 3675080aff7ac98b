"""Why a section of `dex analyze` has nothing to say of a model."""

from __future__ import annotations


class LeftOut(Exception):
    """Raised by a section that does not apply; its sentence stands in the report in the section's place."""
