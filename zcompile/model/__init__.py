"""A model taken apart: units, shards, the values that it starts from."""
