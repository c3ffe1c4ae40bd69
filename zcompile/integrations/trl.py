"""The SFTTrainer and the DPOTrainer of trl, with a model sharded by zcompile.

    from zcompile.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, arguments, train_dataset=data, zcompile={"stage": 3})

For other trainers of trl, use the mixin: `class RewardTrainer(ShardedTrainerMixin, trl.RewardTrainer)`.
"""

from __future__ import annotations

from zcompile.integrations.models import missing
from zcompile.integrations.transformers import ShardedTrainerMixin

try:
    import trl
except ImportError as error:
    raise missing("trl", "trl") from error


class SFTTrainer(ShardedTrainerMixin, trl.SFTTrainer):
    """The SFTTrainer of trl with a sharded model: see `ShardedTrainerMixin`."""


class DPOTrainer(ShardedTrainerMixin, trl.DPOTrainer):
    """The DPOTrainer of trl with a sharded model: see `ShardedTrainerMixin`. The reference model is not sharded."""
