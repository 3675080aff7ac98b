"""The names of languages in a card: ISO 639 codes, and the Hub's own two words."""

from __future__ import annotations

import re

# ISO 639-1. The codes of three letters are some eight thousand; of those the shape alone is checked here.
_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg
ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn
no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw
ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
TWO_LETTERS = frozenset(_CODES.split())
WORDS = ("code", "multilingual")
_THREE_LETTERS = re.compile(r"[a-z]{3}")


def is_language(code: str) -> bool:
    return code in TWO_LETTERS or code in WORDS or _THREE_LETTERS.fullmatch(code) is not None
