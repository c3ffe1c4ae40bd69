"""The SFTTrainer and the DPOTrainer of trl, with their model sharded by zcompile.

    from zcompile.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, arguments, train_dataset=data, zcompile={"stage": 3})

Its other trainers take the mixin: `class RewardTrainer(ShardedTrainerMixin, trl.RewardTrainer)`.
"""

from __future__ import annotations

from zcompile.integrations.models import missing
from zcompile.integrations.transformers import ShardedTrainerMixin

try:
    import trl
except ImportError as error:
    raise missing("trl", "trl") from error


class SFTTrainer(ShardedTrainerMixin, trl.SFTTrainer):
    """The SFTTrainer of trl, its model sharded: `ShardedTrainerMixin` says how."""


class DPOTrainer(ShardedTrainerMixin, trl.DPOTrainer):
    """The DPOTrainer of trl, its model sharded: `ShardedTrainerMixin` says how. Each rank has all of the reference."""
