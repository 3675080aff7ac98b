"""Two models side by side: the second minus the first, of every statistic that both have in one shape."""

from __future__ import annotations

from typing import Any

from dex.analysis.records import ModelReport, Statistic, number


def differences(first: ModelReport, second: ModelReport) -> tuple[list[Statistic], list[str]]:
    """The differences, and sentences that name what could not be compared."""
    made, kept_apart = list[Statistic](), list[str]()
    for one in statistics(first):
        other = second.statistic(one.name)
        if other is None:
            kept_apart.append(f"{one.title} is there for {first.label} alone.")
        elif (one.over, _shape(one.values)) != (other.over, _shape(other.values)):
            kept_apart.append(f"{one.title} has another shape in {second.label} than in {first.label}.")
        elif (one.signs, one.first_token) != (other.signs, other.first_token) and None not in (
            one.signs,
            other.signs,
        ):
            kept_apart.append(f"{one.title} treats signs or the first token differently in the two models.")
        else:
            meaning = one.meaning
            if other.meaning != one.meaning:
                meaning = f"{first.label}: {one.meaning} {second.label}: {other.meaning}"
            change = {
                "values": _minus(other.values, one.values),
                "diverging": True,
                "meaning": f"{second.label} minus {first.label}. {meaning}",
            }
            made.append(one.model_copy(update={**change, "signs": other.signs or one.signs}))
    known = {one.name for one in statistics(first)}
    kept_apart += [
        f"{one.title} is there for {second.label} alone." for one in statistics(second) if one.name not in known
    ]
    return made, kept_apart


def statistics(model: ModelReport) -> list[Statistic]:
    return [one for found in model.sections.values() for one in found.statistics]


def _shape(values: Any) -> tuple[int, ...]:
    return (len(values), *_shape(values[0])) if isinstance(values, list) else ()


def _minus(second: Any, first: Any) -> Any:
    if isinstance(second, list):
        return [_minus(*each) for each in zip(second, first, strict=True)]
    return None if second is None or first is None else number(second - first)
