"""A simulated CUDA device: what zcompile does on GPUs, proven where there is none.

`library` builds the device (`native/`), which makes real `device="cuda"` tensors on the CPU build of torch. Their
kernels run at once on the host, and are told, with every stream, event, allocation and wait, to the `checker`, which
says what a GPU might run in another order. `device` is `torch.cuda` over it, `nccl` process groups as NCCL's.

The device must be there before torch is imported, so what runs on it is a process of its own: a rank of a pool
(`tests.ranks`) that is made with `on="simulated"`. `scenarios` are what such ranks run.
"""
