"""Constraints by JSON Schema and GBNF, which llguidance compiles."""
