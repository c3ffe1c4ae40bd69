"""Planning, inspection and the command line."""
