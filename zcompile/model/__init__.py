"""Dividing a model: its units, its shards, its initial values, and tensor parallelism."""
