"""TFX: ``LabelRandomizer``, a component from Examples to Examples with noisy labels.

Install it with ``pip install 'tf-labeldp[tfx]'``; TFX 1.16 needs Python 3.9 or 3.10.
``examples/09_tfx_pipeline.py`` is a whole pipeline.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.mechanisms import LabelMechanism, Mechanism
from tf_labeldp.scale._engines import needs
from tf_labeldp.vault.keyed_draws import ReleaseKey

needs("tfx", "tfx")

import apache_beam as beam  # noqa: E402
from tfx import types  # noqa: E402
from tfx.components.util import examples_utils  # noqa: E402
from tfx.dsl.components.base import (  # noqa: E402
    base_beam_component,
    base_beam_executor,
    executor_spec,
)
from tfx.proto import example_gen_pb2  # noqa: E402
from tfx.types import artifact_utils, standard_artifacts  # noqa: E402
from tfx.types.component_spec import ChannelParameter, ExecutionParameter  # noqa: E402
from tfx.utils import io_utils  # noqa: E402

from tf_labeldp.scale.beam import RandomizeLabels  # noqa: E402

__all__ = ["LabelRandomizer", "PrivacyStatement"]

_FILE = "noisy.privacy.json"


class PrivacyStatement(types.artifact.Artifact):
    """A folder with ``noisy.privacy.json``: the statement and receipts of noisy Examples.

    Example:
        >>> PrivacyStatement.TYPE_NAME
        'LabelDPStatement'
    """

    TYPE_NAME = "LabelDPStatement"


class _Spec(types.ComponentSpec):
    PARAMETERS: ClassVar = {
        name: ExecutionParameter(type=str)
        for name in ("mechanism", "key", "release", "id", "label", "priors")
    }
    INPUTS: ClassVar = {"examples": ChannelParameter(type=standard_artifacts.Examples)}
    OUTPUTS: ClassVar = {
        "noisy_examples": ChannelParameter(type=standard_artifacts.Examples),
        "statement": ChannelParameter(type=PrivacyStatement),
    }


class _Executor(base_beam_executor.BaseBeamExecutor):
    """Randomizes all splits in one Beam pipeline, as one release with unique ids."""

    def Do(
        self,
        input_dict: dict[str, list[Any]],
        output_dict: dict[str, list[Any]],
        exec_properties: dict[str, Any],
    ) -> None:
        """Reads ``examples``, and writes ``noisy_examples`` and ``statement``."""
        examples = artifact_utils.get_single_instance(input_dict["examples"])
        noisy = artifact_utils.get_single_instance(output_dict["noisy_examples"])
        statement = artifact_utils.get_single_instance(output_dict["statement"])
        payload = examples_utils.get_payload_format(examples)
        if payload != example_gen_pb2.PayloadFormat.FORMAT_TF_EXAMPLE:
            raise ValueError(
                "LabelRandomizer expected Examples in the payload format FORMAT_TF_EXAMPLE, got "
                f"{example_gen_pb2.PayloadFormat.Name(payload)}. Configure ExampleGen."
            )
        splits = artifact_utils.decode_split_names(examples.split_names)
        mechanism: Any = Mechanism.from_json(json.loads(exec_properties["mechanism"]))
        transform = RandomizeLabels(
            mechanism,
            ReleaseKey(exec_properties["key"]),
            exec_properties["release"],
            id=exec_properties["id"],
            label=exec_properties["label"],
            priors=json.loads(exec_properties["priors"]),
            statement=os.path.join(statement.uri, _FILE),
        )
        with self._make_beam_pipeline() as pipeline:
            rows = {}
            for split in splits:
                uri = artifact_utils.get_split_uri([examples], split)
                files = io_utils.all_files_pattern(uri)
                rows[split] = pipeline | f"Read {split}" >> beam.io.ReadFromTFRecord(files)
            for split, drawn in (rows | transform).items():
                path = os.path.join(noisy.uri, f"Split-{split}", "data_tfrecord")
                write = beam.io.WriteToTFRecord(path, file_name_suffix=".gz")
                _ = drawn | f"Write {split}" >> write
        noisy.split_names = examples.split_names
        examples_utils.set_payload_format(noisy, payload)


class LabelRandomizer(base_beam_component.BaseBeamComponent):
    """Replaces the labels of Examples by noisy labels; all splits are one release.

    Guarantee:
        ``noisy_examples`` are (epsilon, delta)-DP for the replacement of one label, as for
        ``beam.RandomizeLabels``: a repeated step has the same draws. The input has the true labels:
        its artifacts, and everything computed from them, statistics included, are as private as the
        labels.

    Args:
        examples: a channel of ``tf.train.Example``s, as ExampleGen writes them.
        mechanism, release, priors: as for ``beam.RandomizeLabels``.
        key: the path of the key file, which the workers read. Create it once, outside the pipeline,
            with ``ReleaseKey.create``.
        id: the feature that identifies a row: one whole number or text.
        label: the feature with the label.

    Outputs ``noisy_examples``, with the same splits, and ``statement``, a ``PrivacyStatement``.

    Example:
        >>> from tfx import v1
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> table = v1.components.CsvExampleGen(input_base="tables")
        >>> mechanism = RandomizedResponse(epsilon=2.0, num_classes=2)
        >>> noisy = LabelRandomizer(
        ...     table.outputs["examples"], mechanism, key="private/labels.key", release="adult",
        ...     label="income",
        ... )
        >>> sorted(noisy.outputs)
        ['noisy_examples', 'statement']
    """

    SPEC_CLASS = _Spec
    EXECUTOR_SPEC = executor_spec.BeamExecutorSpec(_Executor)

    def __init__(
        self,
        examples: Private[Any],
        mechanism: Public[LabelMechanism],
        key: str | os.PathLike[str],
        release: str,
        *,
        id: str = "id",
        label: str = "label",
        priors: Public[Any] = None,
    ) -> None:
        public = public_input(mechanism, priors)
        mechanism, priors = public.value
        described = LabelMechanism.checked(mechanism).to_json()
        # The spec has no field for receipts of the priors, so the mechanism carries them.
        if public.receipts:
            described["receipts"] = [receipt.to_json() for receipt in public.receipts]
        super().__init__(
            spec=_Spec(
                examples=examples,
                mechanism=json.dumps(described),
                key=os.path.abspath(key),
                release=release,
                id=id,
                label=label,
                priors=json.dumps(None if priors is None else [float(p) for p in priors]),
                noisy_examples=types.Channel(type=standard_artifacts.Examples),
                statement=types.Channel(type=PrivacyStatement),
            )
        )
