"""Constraints by JSON Schema and GBNF, compiled by llguidance."""
