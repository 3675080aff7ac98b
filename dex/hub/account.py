"""Whose the token is, and whether a repository is theirs to write to."""

from __future__ import annotations

from typing import Any

from huggingface_hub import HfApi, get_token, is_offline_mode

from dex.errors import DexError
from dex.hub.words import LOG_IN, refusals_explained

_MAY_NOT = ("read", "no_access", "no-access")  # roles in an organisation


def sign_in(api: HfApi, repo_id: str, create_pr: bool) -> str:
    """The name of the user whose token is set.

    Raises DexError without a token, with one that may only read, and for a namespace that is someone else's, unless
    a pull request is all that is wanted. What a fine-grained token may do the Hub says when it is asked to.
    """
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
    namespace = repo_id.split("/")[0]
    writable = [name, *(str(org.get("name")) for org in me.get("orgs", []) if org.get("roleInOrg") not in _MAY_NOT)]
    if not create_pr and namespace.lower() not in [each.lower() for each in writable]:
        raise DexError(
            f"{repo_id} is someone else's, and {name} may write to {', '.join(writable)}; push there, or pass "
            "--create-pr to propose a change."
        )
    return name


def _role(me: dict[str, Any]) -> str | None:
    token = (me.get("auth") or {}).get("accessToken") or {}
    return token.get("role")
