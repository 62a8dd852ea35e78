"""From logits to a token: penalties, truncation, noise."""
