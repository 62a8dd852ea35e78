"""Speculative decoding itself: verification rules, drafters, the controller, rounds."""
