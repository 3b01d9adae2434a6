"""The ops: each is declared by its torch reference, beside the docstring that is its contract."""
