"""CPU providers."""
