"""The SFTTrainer of trl, with its model sharded by zcompile.

    from zcompile.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, arguments, train_dataset=data, zcompile={"stage": 3})

Its other trainers take the mixin: `class DPOTrainer(ShardedTrainerMixin, trl.DPOTrainer)`.
"""

from __future__ import annotations

from zcompile.integrations.missing import missing
from zcompile.integrations.transformers import ShardedTrainerMixin

try:
    import trl
except ImportError as error:
    raise missing("trl", "trl") from error


class SFTTrainer(ShardedTrainerMixin, trl.SFTTrainer):
    """The SFTTrainer of trl, its model sharded: `ShardedTrainerMixin` says how."""
