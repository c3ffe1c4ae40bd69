"""Keys of DeepSpeed's JSON that become no option: what zcompile does in another way, and what it has not."""

from __future__ import annotations

ZERO = "zero_optimization"
_UNITS = "gathers are by unit, prefetch= of them ahead; prefetch='auto' chooses by measured links"
_BUCKET = (
    "the cost model chooses how much is sent at once; bucket= would fix it, in bytes where DeepSpeed counts elements"
)
_KEPT = "memory_limit= keeps as many units full as fit; without it at most prefetch= beside the one that computes"
_LOOP = "the DataLoader and the loop decide: each rank takes batches of its own"
_OWN_LOOP = "log in the loop"

OTHERWISE = {
    "train_batch_size": _LOOP,
    "train_micro_batch_size_per_gpu": _LOOP,
    "scheduler": "torch.optim.lr_scheduler works as it is: scheduler.step() in the loop",
    "steps_per_print": _OWN_LOOP,
    "wall_clock_breakdown": "print(compiled.timeline) says where the last step's time went",
    "memory_breakdown": "compiled.explain() predicts memory, and `zcompile plan` does before a run",
    "dump_state": "compile(..., dump='folder') writes the programs",
    "flops_profiler": "`zcompile plan` and compiled.timeline count FLOPs and seconds",
    "comms_logger": "compiled.traffic counts what was sent and waited for",
    "autotuning": "`zcompile plan` compares the choices before a run",
    "compile": "zcompile compiles anyway",
    "torch_autocast": "dtype= runs the call under torch.autocast",
    "zero_allow_untested_optimizer": "any torch optimizer is taken",
    "checkpoint": "compiled.save_checkpoint(folder, optimizer) writes checkpoints that load in any stage and world",
    "load_universal_checkpoint": "checkpoints load in any stage and world",
    "dataloader_drop_last": "drop_last= of the DataLoader; ranks may also have batches of different sizes",
    "sparse_gradients": "gradients of embeddings are dense, averaged with their unit",
    "tensor_parallel": "torch.distributed.tensor.parallel before zcompile.compile, on a mesh with a dimension for it",
    "pipeline": "train_step(..., mesh=..., schedule='1f1b', microbatches=...) on a mesh with a dimension 'pp'",
    f"{ZERO}.reduce_bucket_size": _BUCKET,
    f"{ZERO}.allgather_bucket_size": _BUCKET,
    f"{ZERO}.stage3_prefetch_bucket_size": _UNITS,
    f"{ZERO}.prefetch_bucket_size": _UNITS,
    f"{ZERO}.stage3_max_live_parameters": _KEPT,
    f"{ZERO}.stage3_max_reuse_distance": _KEPT,
    **dict.fromkeys(
        (f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_model_persistence_threshold"),
        "small parameters travel packed with their neighbours, and none stays full for its size",
    ),
    f"{ZERO}.allgather_partitions": "stages 1 and 2 gather parameters unit by unit, where they are read",
    f"{ZERO}.reduce_scatter": "gradients are scattered in stages 1 to 3",
    f"{ZERO}.contiguous_gradients": "arenas=True keeps memory at fixed places from step to step",
    f"{ZERO}.round_robin_gradients": "each parameter is divided among all ranks",
    f"{ZERO}.sub_group_size": "train_step updates unit by unit",
    f"{ZERO}.elastic_checkpoint": "checkpoints load in any stage and world",
    f"{ZERO}.ignore_unused_parameters": "unused parameters are found in the trace, and have no gradient",
    f"{ZERO}.leaf_module": "units= names what is gathered together",
    f"{ZERO}.memory_efficient_linear": "the partitioner decides what is saved for the backward",
    f"{ZERO}.use_multi_rank_bucket_allreduce": "the program says how gradients travel",
    f"{ZERO}.module_granularity_threshold": "units= names what is gathered together",
    f"{ZERO}.load_from_fp32_weights": "shards are in the model's dtype: load float32 weights for float32 shards",
    **{
        f"{ZERO}.{which}.pin_memory": "memory on the host is always pinned"
        for which in ("offload_optimizer", "offload_param")
    },
    "activation_checkpointing.number_checkpoints": "checkpoint= takes a size or a share of the peak",
    "activation_checkpointing.contiguous_memory_optimization": "arenas=True gives saved activations fixed places",
    "activation_checkpointing.synchronize_checkpoint_boundary": "the program orders what it waits for",
    "activation_checkpointing.profile": "print(compiled.timeline)",
}
MISSING = {
    "amp": "Apex is not used: dtype= computes in 16 bits over float32 shards",
    "prescale_gradients": "gradients are averaged after the sum, in reduce_dtype",
    "gradient_predivide_factor": "gradients are averaged after the sum, in reduce_dtype",
    "zero_force_ds_cpu_optimizer": "there is no DeepSpeedCPUAdam: torch.optim.AdamW(fused=True) steps on the CPU",
    "tensorboard": _OWN_LOOP,
    "wandb": _OWN_LOOP,
    "csv_monitor": _OWN_LOOP,
    "comet": _OWN_LOOP,
    "sparse_attention": "models are compiled as they are",
    "data_efficiency": "data are the loop's business",
    "data_types": "gradients are accumulated in the dtype of the parameters",
    "curriculum_learning": "data are the loop's business",
    "progressive_layer_drop": "models are compiled as they are",
    "eigenvalue": "is not measured",
    "compression_training": "models are compiled as they are",
    "quantize_training": "models are compiled as they are",
    "elasticity": "start again with another world: checkpoints load in it",
    "aio": "what is on a disk is mapped into memory",
    "hybrid_engine": "generate under `with compiled.unsharded():`",
    "nebula": "checkpoints are written by torch.distributed.checkpoint",
    "seed": "call torch.manual_seed",
    f"{ZERO}.zero_quantized_nontrainable_weights": "int8 is for what travels between nodes: outer_gather_dtype=",
    f"{ZERO}.zenflow": "all updates wait for their gradients",
    f"{ZERO}.mics_hierarchical_params_gather": "shard='hsdp' gathers within a node only",
    f"{ZERO}.pipeline_loading_checkpoint": "checkpoints are read by torch.distributed.checkpoint",
    f"{ZERO}.legacy_stage1": "there is one stage 1",
    f"{ZERO}.override_module_apply": "modules keep their methods",
    f"{ZERO}.log_trace_cache_warnings": "the order of gathers is fixed in the program",
    **{
        f"{ZERO}.{which}.{key}": reason
        for which in ("offload_optimizer", "offload_param")
        for key, reason in {
            "buffer_count": "what is fetched ahead goes by unit: prefetch=",
            "buffer_size": "what is fetched ahead goes by unit: prefetch=",
            "max_in_cpu": "all shards are on the host",
            "nvme_path": "files are for models on a CPU: 'disk:FOLDER'",
            "fast_init": "the optimizer's state is made where it is kept",
            "pipeline_read": "transfers always run beside compute",
            "pipeline_write": "transfers always run beside compute",
            "ratio": "all of it is on the host, or nothing",
            "super_offload": "all of it is on the host, or nothing",
        }.items()
    },
}
