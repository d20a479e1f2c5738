"""The first lines of a user of the wheel: `python wheel_smoke.py FOLDER_OF_INSTALLATION`.

`make wheel-test` runs it without pytest, with the dependencies of the wheel alone.
"""

import math
import sys
from pathlib import Path
from types import ModuleType


def require_from(installation: Path, module: ModuleType) -> None:
    path = Path(module.__file__ or "").resolve()
    if installation.resolve() not in path.parents:
        raise SystemExit(f"{module.__name__} comes from {path}, not from {installation}")


def main(installation: Path) -> None:
    # An editable installation in the same environment would hide missing files.
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable__")
    ]

    import numpy as np

    import tf_labeldp as ldp

    require_from(installation, ldp)
    import tf_labeldp.keras_layers as layers

    require_from(installation, layers)
    for name in ldp.__all__:
        getattr(ldp, name)

    mechanism = ldp.mechanisms.RandomizedResponse(epsilon=1.0, num_classes=3)
    noisy = mechanism.randomize(np.array([0, 1, 2, 1]))
    if np.shape(noisy) != (4,):
        raise SystemExit(f"expected 4 noisy labels, got {noisy!r}")

    # With one-hot weights and equal logits the weighted loss is the plain loss, log 3.
    loss = layers.LabelWeightedLoss("categorical_crossentropy", from_logits=True)
    value = float(loss(np.eye(3, dtype="float32"), np.zeros((3, 3), "float32")))
    if not math.isclose(value, math.log(3), rel_tol=1e-5):
        raise SystemExit(f"expected a loss of log 3, got {value}")
    print("smoke: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
