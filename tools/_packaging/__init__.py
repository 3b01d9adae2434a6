"""What the packaging tools and tests share: distributions of the checkout and environments to try them in."""
