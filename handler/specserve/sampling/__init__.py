"""Makes a distribution of logits, and draws a token of it: penalties, truncation, noise."""
