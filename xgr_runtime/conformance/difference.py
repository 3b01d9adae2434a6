"""What a failed comparison raises. No `assert`: the checks of a shipped command hold under `python -O` too."""


class Difference(AssertionError):
    """Something is not what it has to be; the message says what was expected and what came."""


def require(is_so: bool, message: str) -> None:
    """Raise Difference unless it is so."""
    if not is_so:
        raise Difference(message)
