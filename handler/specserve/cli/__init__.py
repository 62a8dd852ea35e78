"""The commands that `scripts/` runs."""
