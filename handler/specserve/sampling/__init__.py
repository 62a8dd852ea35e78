"""From a row of logits to a distribution and a token: penalties, cuts, noise."""
