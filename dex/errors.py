"""The one exception that a user is meant to see."""


class DexError(Exception):
    """Something the user can mend: one sentence that says what is wrong, where, and what to do.

    Raised where the cause is known; shown once, without a traceback, by the command line (exit code 1).
    """
