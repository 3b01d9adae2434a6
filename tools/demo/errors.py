"""What ends the demo in one line."""

from xgr_runtime.errors import XgrError


class DemoError(XgrError, RuntimeError):
    """The demo cannot run: its input is missing or not the expected one, or one of its processes failed."""
