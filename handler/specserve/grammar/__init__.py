"""Grammars that answers must follow: schemas and GBNF, compiled by llguidance."""
