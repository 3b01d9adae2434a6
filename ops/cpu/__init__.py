"""CPU providers that may branch and size by data."""
