"""Whose the token is, and in whose names its user may make a repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, get_token, is_offline_mode

from dex.errors import DexError
from dex.hub.words import LOG_IN, refusals_explained


@dataclass(frozen=True)
class Account:
    """A user, and its organisations. What it may do in each the Hub says when it is asked to: a role does not."""

    name: str
    organisations: list[str]

    @property
    def namespaces(self) -> list[str]:
        return [self.name, *self.organisations]

    def has_namespace_of(self, repo_id: str) -> bool:
        return repo_id.split("/")[0].lower() in [each.lower() for each in self.namespaces]


def sign_in(api: HfApi, repo_id: str) -> Account:
    """The user whose token is set. Raises DexError without a token, and with one that may only read."""
    if repo_id.count("/") != 1:
        raise DexError(f"{repo_id} is no full name of a repository; give organisation/name.")
    if is_offline_mode():
        raise DexError("HF_HUB_OFFLINE is set, and pushing needs the Hub; unset it.")
    if get_token() is None:
        raise DexError(f"There is no token of the Hub, which pushing to {repo_id} needs; {LOG_IN}.")
    with refusals_explained(repo_id, "asking whose the token is"):
        me = api.whoami()
    name = str(me.get("name"))
    if _role(me) == "read":
        raise DexError(f"The token of {name} may only read; {LOG_IN}.")
    return Account(name, [str(org.get("name")) for org in me.get("orgs", [])])


def _role(me: dict[str, Any]) -> str | None:
    token = (me.get("auth") or {}).get("accessToken") or {}
    return token.get("role")
