from dataclasses import dataclass

from dex.planning.outline import outline
from dex.planning.step import simulate


@dataclass
class P:
    memory: object


def plan(recipe, device=None, processes=1):
    return P(simulate(recipe, outline(recipe), False))
