"""The commands behind `scripts/`."""
