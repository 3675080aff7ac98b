"""What a card reads of certificate.json, layout.json, adapter_config.json and heads.json, checked before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dex.cards.kind import Kind
from dex.errors import DexError
from dex.json_object import read_json
from dex.lock import CERTIFICATE

Numbers = Annotated[list[float], Field(min_length=1)]


class _Used(BaseModel):
    """The keys that a card uses; others may be there."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class _Text(_Used):
    positions: int
    source: str


class _Agreement(_Used):
    max_logit_difference: float
    largest_logit: float
    kl: float
    top1_agreement: float


class _Divergence(_Agreement):
    loss: float
    loss_of_the_base: float


class _Branch(_Used):
    lam: Numbers
    ratio: Numbers
    mean_ratio: float
    inert: bool
    layers: list[int] | None = None

    @model_validator(mode="after")
    def _is_of_the_same_layers(self) -> _Branch:
        lengths = {len(each) for each in (self.lam, self.ratio, self.layers) if each is not None}
        if len(lengths) != 1:
            raise ValueError("lam, ratio and layers are not of the same layers")
        return self


class _Certificate(_Used):
    dtype: str
    trained_on: str
    lambda_scale: float = 1.0
    text: _Text
    folded_against_attached: _Agreement
    branch: _Branch | None


class _Fresh(_Used):
    layout: Literal["diff-v1", "diff-v2", "diffllama", "base"]
    base: dict[str, Any] | None = None
    like: dict[str, Any] | None = None


class _Layout(_Fresh):
    dtype: str
    text: _Text
    divergence: _Divergence


class _Adapter(_Used):
    base_model_name_or_path: str | None = None
    revision: str | None = None


class _Dex(_Adapter):
    schedule: str
    heads: list[list[int]] | dict[str, Any] | str | None = None


class _Lora(_Adapter):
    r: int
    lora_alpha: float
    target_modules: list[str]


class _Trained(_Used):
    model_type: str


class _Counted(_Used):
    num_layers: int
    num_heads: int


class _Data(_Used):
    source: str
    sequences: int
    length: int


class _Heads(_Used):
    criterion: str | None
    heads: list[list[int]]
    model: _Counted
    data: _Data | None = None


_OF_KIND: dict[Kind, tuple[str, type[_Used]]] = {
    "adapter": ("adapter_config.json", _Dex),
    "lora": ("adapter_config.json", _Lora),
    "folded": (CERTIFICATE, _Certificate),
    "layout": ("layout.json", _Layout),
    "fresh": ("layout.json", _Fresh),
    "trained": ("config.json", _Trained),
}


def check_records(folder: Path, kind: Kind) -> None:
    """Raise DexError, naming the file and the key, for a record that a card of this kind cannot be written from."""
    name, used = _OF_KIND[kind]
    _check(folder / name, used)
    if (folder / "heads.json").is_file():
        _check(folder / "heads.json", _Heads)


def _check(path: Path, used: type[_Used]) -> None:
    values = read_json(path)
    try:
        used.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise DexError(f"{path} is damaged ({reason}); make the folder again.") from None
