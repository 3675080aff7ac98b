"""The model card: README.md of every folder that dex writes, rendered from what lies in it, and checked.

    write_card(folder, source)          # by train, fold, convert, init; source: the model that it was made of
    read_front_matter(folder)           # its YAML head, validated
    check_card(folder, "me/my-model")   # what must be right before it is published

Beside README.md lie card.json (the base, its licence, what `dex card` was told) and evaluation.json (what
`dex card --results` found), so that a card can be written again from its folder alone. The templates are in
model_cards/. Only what is known is said, and nothing that is not measured.
"""

from __future__ import annotations

from dex.cards.check import check_card
from dex.cards.front_matter import FrontMatter, read_front_matter
from dex.cards.write import write_card

__all__ = ["FrontMatter", "check_card", "read_front_matter", "write_card"]
