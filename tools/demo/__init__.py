"""The demo: its data, its model and its yardsticks. Run from the repository root."""
