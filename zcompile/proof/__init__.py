"""Proof of values: terms of what is computed, compared with what was traced."""
