"""Calls of a model: what runs as a program of its own, and what a backward must find as its forward left it."""
