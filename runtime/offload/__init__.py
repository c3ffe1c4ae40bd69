"""Shards, optimizer state and activations in the memory of the host and on disks."""
