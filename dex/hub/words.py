"""What a person reads where the Hub says no, or nothing. The token is in none of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

from dex.errors import DexError

AGAIN = "run the same command again: what was uploaded is kept, and nothing is half published"
LOG_IN = "set HF_TOKEN to one that may write, or run `hf auth login`"
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{10,}")


@contextmanager
def refusals_explained(repo_id: str, doing: str, may_propose: bool = False) -> Iterator[None]:
    """Turn whatever the client raises into one sentence; `doing` goes on "while …".

    may_propose: would a pull request do, where the token may not write?
    """
    try:
        yield
    except DexError:
        raise
    except Exception as error:  # hf_xet and the client's threads have classes of their own
        # Without the chain: the requests in it hold the token.
        raise DexError(explain(repo_id, doing, error, may_propose)) from None


def explain(repo_id: str, doing: str, error: BaseException, may_propose: bool = False) -> str:
    cause = _cause(error)
    if (
        isinstance(cause, HTTPError) and getattr(cause, "response", None) is not None
    ):  # also one that is no HfHubHTTPError
        return _refused(repo_id, doing, cause, may_propose)
    if isinstance(cause, HTTPError | ConnectionError):
        return f"The Hub could not be reached while {doing} ({_line(str(cause), cause)}); {AGAIN}."
    if isinstance(cause, OSError):
        return f"A file could not be used while {doing}: {cause.strerror or _line(str(cause), cause)}; then {AGAIN}."
    return f"The Hub's client failed while {doing} ({_line(str(cause), cause)}); {AGAIN}."


def _cause(error: BaseException) -> BaseException:
    """The error that the client's own wrapping hides."""
    while isinstance(error, RuntimeError | ValueError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _refused(repo_id: str, doing: str, error: Any, may_propose: bool) -> str:
    status = error.response.status_code
    said = _said(error)
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"The Hub does not accept the token (401); {LOG_IN}."
    if status in (401, 404):
        return f"{repo_id} is not on the Hub, or the token may not see it ({status}, while {doing}); check the name."
    if status == 403:
        instead = f"{LOG_IN}, or pass --create-pr" if may_propose else LOG_IN
        return f"The token may not do this to {repo_id} (403 while {doing}: {said}); {instead}."
    if status in (409, 412):
        return (
            f"{repo_id} has moved while it was being pushed to ({status}: {said}), and nothing was committed; run "
            "the same command again, which begins with what is there now."
        )
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        when = f"in {wait} s" if wait and wait.isdigit() else "later"
        return f"The Hub has had too many requests (429, while {doing}); {when}, {AGAIN}."
    if status >= 500:
        return f"The Hub answered with error {status} while {doing}; {AGAIN}."
    return f"The Hub refused {repo_id} while {doing} ({status}: {said})."


def _said(error: Any) -> str:
    """What the Hub gave as its reason."""
    message = getattr(error, "server_message", None) or error.response.headers.get("X-Error-Message")
    return _line(message or "no reason given", error)


def _line(text: str, error: BaseException) -> str:
    """The first line of a text, short, and without the token or what looks like one: a half of it is one still."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    if token := get_token():
        line = line.replace(token, "<token>")
    return _TOKEN.sub("<token>", line)[:200].rstrip(".:")
