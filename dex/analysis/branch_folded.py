"""What the certificate of a folded folder says of the branch that was folded into W_O (dex/verbs/fold.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from dex.analysis.branch_statistics import of_lam_and_ratio, verdict
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.subject import Subject
from dex.errors import DexError
from dex.lock import CERTIFICATE

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Recorded(BaseModel):
    """`branch` of certificate.json: one number for each adapted layer."""

    layers: list[int]
    lam: list[_Finite]
    ratio: list[_Finite]
    mean_ratio: _Finite


def folded_branch(subject: Subject) -> Findings:
    """Raises LeftOut where nothing was folded, or no branch, and DexError for a damaged certificate."""
    path = Path(subject.path) / CERTIFICATE
    if not path.is_file():
        raise LeftOut("The model has no Dex branch, and no certificate says that one was folded into it.")
    recorded = _read_certificate(path, len(subject.layers))
    where = ", as recorded when the adapter was folded"
    remarks = [
        verdict(recorded.mean_ratio, recorded.lam),
        f"λ and the branch ratios are those that {CERTIFICATE} recorded at the fold, on the text of the fold: the "
        "branch is part of W_O now, and nothing of it can be measured here.",
    ]
    lam, ratio = (dict(zip(recorded.layers, each, strict=True)) for each in (recorded.lam, recorded.ratio))
    statistics = of_lam_and_ratio(lam, ratio, recorded.mean_ratio, len(subject.layers), where)
    return Findings(statistics=statistics, remarks=remarks)


def _read_certificate(path: Path, num_layers: int) -> _Recorded:
    try:
        certificate: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(certificate, dict):
            raise ValueError("it holds no JSON object")
        branch = certificate.get("branch")
        recorded = None if branch is None else _Recorded.model_validate(branch)
        if recorded is not None and not set(recorded.layers) <= set(range(num_layers)):
            raise ValueError("it names a layer that the model has not")
        if recorded is not None and not len(set(recorded.layers)) == len(recorded.lam) == len(recorded.ratio) > 0:
            raise ValueError("its layers, their λ and their ratios are not as many")
    except (OSError, ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise DexError(f"{path} is damaged ({reason}); fold the adapter again with `dex fold`.") from error
    if recorded is None:
        raise LeftOut(
            f"The model is a folded one, and {CERTIFICATE} records no branch: the adapter had none, or an earlier "
            "release of dex folded it."
        )
    return recorded
