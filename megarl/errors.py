"""The two failures a user sees in one line: a wrong input is a ValueError, a failing environment a MegarlError."""


class MegarlError(RuntimeError):
    """Something outside the program failed: an engine died, a socket is taken, a version does not fit."""
