"""Model architectures; every layer calls ops bound at warm-up."""
