"""The one exception that a user is meant to see."""


class DexError(Exception):
    """Something the user can mend: one sentence that says what is wrong, where, and what to do.

    Raised where the cause is known; shown once, without a traceback, by the command line (exit code 1).
    """


class NotFinite(DexError):
    """A run whose loss, gradient or weights are no numbers any more: a result of its settings, not a mistake."""
