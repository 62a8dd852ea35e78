"""Speculative decoding itself: distributions, verification rules, drafters, rounds."""
