"""Training of Keras models on private labels: multi-stage training, and DP-SGD with denoisers."""

from tf_labeldp.training._denoisers import AltConv, Denoiser, NoOp, SelfConv, SelfSpan
from tf_labeldp.training._gaussian_noise import GaussianNoise, NoiseMechanism
from tf_labeldp.training._label_dp_model import LabelDPModel, PrivacySpent
from tf_labeldp.training._label_dp_optimizer import LabelDPOptimizer
from tf_labeldp.training._make_private import make_private
from tf_labeldp.training._multi_stage import MultiStageTraining
from tf_labeldp.training._preconditioner import GaussNewton
from tf_labeldp.training._record_receipts import RecordReceipts, fit
from tf_labeldp.training._vertex_losses import VertexLosses

__all__ = [
    "AltConv",
    "Denoiser",
    "GaussNewton",
    "GaussianNoise",
    "LabelDPModel",
    "LabelDPOptimizer",
    "MultiStageTraining",
    "NoOp",
    "NoiseMechanism",
    "PrivacySpent",
    "RecordReceipts",
    "SelfConv",
    "SelfSpan",
    "VertexLosses",
    "fit",
    "make_private",
]
