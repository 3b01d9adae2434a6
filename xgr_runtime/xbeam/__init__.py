"""Catalogue, trie, rules and the exact beam search over them."""
