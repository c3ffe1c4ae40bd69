"""The runtime: groups, shards, the executor of printed programs. It knows nothing of FX."""
