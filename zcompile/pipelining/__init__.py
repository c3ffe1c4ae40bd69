"""Pipeline parallelism: layers divided among ranks, steps of several micro-batches, one program per rank."""
