"""A scikit-learn pipeline as a Keras model: its steps before the private estimator as layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

from tf_labeldp.accounting import Charge, Receipt, public_input
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.provenance import LayerHistory
from tf_labeldp.features.estimator import FeatureMap, keras_model, with_encoder
from tf_labeldp.vault import guarantee
from tf_labeldp.vault.model_history import TrainedModel


def steps_of(estimator: Any) -> list[tuple[str, Any]]:
    """Returns the named steps of a pipeline, of its pipelines too; an estimator is one step."""
    if not isinstance(estimator, Pipeline):
        return [("", estimator)]
    steps = [(name, step) for name, step in estimator.steps if step not in (None, "passthrough")]
    return [(inner or name, part) for name, step in steps for inner, part in steps_of(step)]


def with_steps(network: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    """Returns a Keras model of the fitted steps of a pipeline and, behind them, a network.

    Raises:
        TypeError: a step that has no layers here.
        ValueError: a network or a step with several inputs.
    """
    if not steps:
        return network
    name, first = steps[0]
    if isinstance(first, FeatureMap):
        inputs, rows = with_encoder(first, first.n_features_out_)
        steps = steps[1:]
    else:
        _check(name, first)
        inputs, rows = with_encoder(None, first.n_features_in_)
    for name, step in steps:
        _check(name, step)
        rows = (
            step.to_keras()(rows)
            if isinstance(step, FeatureMap)
            else _LAYERS[type(step)](step, rows)
        )
    if len(network.inputs) != 1:
        raise ValueError(
            f"expected a last step that was fitted on rows of numbers, got one with "
            f"{len(network.inputs)} inputs. Fit the pipeline again without set_output."
        )
    # Its file names the classes once, not in the network within it.
    inner = keras_model(network.inputs, network.outputs, network.name)
    model = keras_model(inputs, inner(rows), "pipeline")
    # Its columns are those of the last step.
    TrainedModel(model).note_facts({**TrainedModel(network).note_facts({}), "columns": None})
    return model


def statement_receipts(pipeline: Pipeline, network: Any) -> list[Receipt]:
    """Returns receipts by which a network states what the pipeline does, beyond its own ones."""
    own, stated = LayerHistory(public_input(network).receipts).guarantee(), guarantee(pipeline)
    if math.isinf(stated.epsilon) and not math.isinf(own.epsilon):
        return [Receipt.of_unknown_training(str(stated.assumptions[0]))]
    notes = tuple(note for note in stated.assumptions if note not in own.assumptions)
    labels = public_input(pipeline).receipts[-1].labels
    free = Charge(0.0, 0.0, EventFields.NONE, notes)
    return [Receipt(labels, free, "the steps of a pipeline", "declared")] if notes else []


def _check(name: str, step: Any) -> None:
    """Raises if a step is computed by no layer; a class of the user may learn or compute more."""
    is_plain = not isinstance(step, SimpleImputer) or not (
        step.add_indicator or np.isnan(_numbers(step.statistics_)).any()
    )
    if not isinstance(step, FeatureMap) and not (type(step) in _LAYERS and is_plain):
        kinds = ", ".join(kind.__name__ for kind in _LAYERS)
        raise TypeError(
            f"expected steps that Keras computes ({kinds}, or a map of tf_labeldp.features), got "
            f"{name!r} ({type(step).__name__}). Give the table to the private estimator itself, "
            "which encodes its columns, or encoder=tf_labeldp.features.RandomFourierFeatures()."
        )


def _numbers(values: Any) -> np.ndarray:
    return np.asarray(values, np.float64)


def _affine(rows: Any, scale: Any, offset: Any) -> Any:
    from keras import layers

    parts = [_numbers(part).tolist() for part in np.broadcast_arrays(scale, offset)]
    return layers.Rescaling(*parts, dtype="float32")(rows)


def _standardized(step: Any, rows: Any) -> Any:
    mean = _numbers(step.mean_) if step.with_mean else 0.0
    scale = _numbers(step.scale_) if step.with_std else 1.0
    return _affine(rows, 1.0 / scale, -mean / scale)


def _robust(step: Any, rows: Any) -> Any:
    center = _numbers(step.center_) if step.with_centering else 0.0
    scale = _numbers(step.scale_) if step.with_scaling else 1.0
    return _affine(rows, 1.0 / scale, -center / scale)


def _min_max(step: Any, rows: Any) -> Any:
    from keras import ops

    rows = _affine(rows, step.scale_, step.min_)
    return ops.clip(rows, *map(float, step.feature_range)) if step.clip else rows


def _imputed(step: Any, rows: Any) -> Any:
    from keras import ops

    is_missing = ops.isnan(rows)
    if not np.isnan(step.missing_values):
        is_missing = ops.equal(rows, float(step.missing_values))
    zeros = ops.where(is_missing, 0.0, rows)
    fill = _affine(ops.cast(is_missing, "float32"), step.statistics_, 0.0)
    return ops.add(zeros, fill)


def _components(step: Any, rows: Any) -> Any:
    from keras import layers

    weights = _numbers(step.components_).T
    if step.whiten:
        weights = weights / np.sqrt(_numbers(step.explained_variance_))
    dense = layers.Dense(weights.shape[1], use_bias=False, trainable=False, dtype="float32")
    outputs = dense(_affine(rows, 1.0, -_numbers(step.mean_)))
    dense.set_weights([weights.astype(np.float32)])
    return outputs


_LAYERS: dict[type, Callable[[Any, Any], Any]] = {
    StandardScaler: _standardized,
    RobustScaler: _robust,
    MinMaxScaler: _min_max,
    MaxAbsScaler: lambda step, rows: _affine(rows, 1.0 / _numbers(step.scale_), 0.0),
    SimpleImputer: _imputed,
    PCA: _components,
}
"""The layers of a fitted step, by its class."""
