"""Checks of a device by the package itself: every provider of every op, searches with known answers, a whole engine."""
