"""Shared (history) and unshared (beam) key-value caches: layout, storage, page allocation."""
