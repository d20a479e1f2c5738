"""Priors for RRWithPrior from what a model or an expert says."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate


def prior_from_logits(logits: Any, temperature: float = 1.0) -> np.ndarray:
    """Returns ``softmax(logits / temperature)``, the prior of LP-MST (``ghazi2021``, appendix B).

    Args:
        logits: array (K,) or (n, K); finite.
        temperature: above zero; below one sharpens the prior, above one flattens it.

    Returns:
        ``float64`` array of the same shape whose last axis sums to one.

    Raises:
        ValueError: the temperature is out of range or a logit is not finite.

    Example:
        >>> prior_from_logits([2.0, 1.0, 0.0]).round(4).tolist()
        [0.6652, 0.2447, 0.09]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    array = np.asarray(logits, dtype=np.float64)
    if not np.all(np.isfinite(array)):
        bad = int(np.count_nonzero(~np.isfinite(array)))
        raise ValueError(
            f"logits must be finite, but {bad} are NaN or infinite. The model has diverged: lower "
            "its learning rate."
        )
    return _softmax(array / temperature)


def sharpen_prior(prior: Any, temperature: float) -> np.ndarray:
    """Returns ``prior^(1 / temperature)``, normalised: the temperature of a prior without logits.

    It equals ``prior_from_logits(log(prior), temperature)``; a probability of zero stays zero.

    Args:
        prior: probabilities (K,) or (n, K); rows sum to one (tolerance 1e-4).
        temperature: above zero; below one sharpens, above one flattens.

    Returns:
        ``float64`` array of the same shape whose last axis sums to one.

    Raises:
        ValueError: not probabilities, or the temperature is out of range.

    Example:
        >>> sharpen_prior([0.5, 0.3, 0.2], temperature=0.5).round(4).tolist()
        [0.6579, 0.2368, 0.1053]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    shape = np.shape(prior)
    if len(shape) not in (1, 2):
        raise ValueError(f"prior must have shape (K,) or (n, K), got {shape}.")
    rows = _validate.prior_rows("prior", prior, None, shape[-1])
    with np.errstate(divide="ignore"):
        return _softmax(np.log(rows) / temperature).reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    from scipy import special  # not loaded with the vault, which imports this part

    return special.softmax(logits, axis=-1)
