"""Everything that turns a fresh clone into a running server: the commands behind `scripts/`."""
