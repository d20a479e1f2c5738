"""Lower bounds on epsilon by attacks, at a confidence, to compare with a claim."""

from tf_labeldp.audit._audits import audit_mechanism, audit_model, audit_training, label_inference
from tf_labeldp.audit._result import AuditResult, LabelInference

__all__ = [
    "AuditResult",
    "LabelInference",
    "audit_mechanism",
    "audit_model",
    "audit_training",
    "label_inference",
]
