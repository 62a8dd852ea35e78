"""Model files: where they are found, and where they come from."""
