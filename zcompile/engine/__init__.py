"""What compiles and runs the programs of a sharded model."""
