"""Calls of a model: which modules run as programs of their own, and what a backward relies on from its forward."""
