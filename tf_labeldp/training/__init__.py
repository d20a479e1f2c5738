"""Training on noisy labels with ``model.fit``: multi-stage training."""

from tf_labeldp.training._multi_stage import MultiStageTraining, StageReport

__all__ = ["MultiStageTraining", "StageReport"]
