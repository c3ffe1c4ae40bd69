"""Proofs: that what is computed is what was traced, by terms, and that ranks' communications fit together."""
