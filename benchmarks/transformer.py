"""A transformer encoder of any size with its weights in a side file, generated the same way every time.

Real models of this size are too large to carry around; what matters to a cache is how many bytes there are, that they
lie beside the graph, and that TensorRT really builds them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LARGE", "TINY", "Transformer"]

_SEED = 20240607


@dataclass(frozen=True)
class Transformer:
    """Sizes of the encoder; weights are FP16.

    Attributes:
        layers: Number of blocks.
        hidden: Width.
        heads: Attention heads.
    """

    layers: int
    hidden: int
    heads: int

    @property
    def name(self) -> str:
        """For tables and file names."""
        return f"transformer-{self.layers}x{self.hidden}"

    @property
    def profiles(self) -> Mapping[str, Any]:
        """Optimization profiles: batch and sequence length are dynamic."""
        shapes = ((1, 16), (1, 128), (4, 256))
        return {"x": tuple((batch, length, self.hidden) for batch, length in shapes)}

    def write(self, folder: Path) -> Path:
        """The model's path below `folder`, generated first if it is not there yet."""
        done = folder / self.name
        path = done / "model.onnx"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                target = Path(unfinished) / self.name
                target.mkdir()
                self._generate(target)
                os.replace(target, done)
        return path

    def _generate(self, folder: Path) -> None:
        import numpy as np
        import onnx
        from onnx import TensorProto, helper

        random = np.random.default_rng(_SEED)
        nodes: list[Any] = []
        weights: list[Any] = []

        with (folder / "model.data").open("wb") as data:

            def weight(name: str, *shape: int) -> str:
                """A random matrix, written to the side file."""
                values = random.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5)
                tensor = TensorProto(
                    name=name, dims=shape, data_type=TensorProto.FLOAT16, data_location=TensorProto.EXTERNAL
                )
                offset = data.tell()
                length = data.write(values.astype(np.float16).tobytes())
                for key, value in (("location", "model.data"), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
                weights.append(tensor)
                return name

            def constant(name: str, values: Any) -> str:
                """A small tensor, kept in the graph file."""
                weights.append(onnx.numpy_helper.from_array(values, name))
                return name

            def node(operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
                made = [f"{operator}_{len(nodes)}_{number}" for number in range(outputs)]
                nodes.append(helper.make_node(operator, list(inputs), made, f"n{len(nodes)}_{operator}", **attributes))
                return made[0] if outputs == 1 else made

            def half(value: float) -> Any:
                return np.array(value, np.float16)

            width, head = self.hidden, self.hidden // self.heads
            ones = constant("ones", np.ones(width, np.float16))
            zeros = constant("zeros", np.zeros(width, np.float16))
            split = constant("split_heads", np.array([0, 0, self.heads, head], np.int64))
            join = constant("join_heads", np.array([0, 0, width], np.int64))
            scale = constant("scale", half(head**-0.5))
            root, one, one_half = (
                constant("root_two", half(2**0.5)),
                constant("one", half(1)),
                constant("one_half", half(0.5)),
            )

            def heads(x: str, order: list[int]) -> Any:
                return node("Transpose", node("Reshape", x, split), perm=order)

            x = "x"
            for layer in range(self.layers):
                normal = node("LayerNormalization", x, ones, zeros, axis=-1)
                query, key, value = node(
                    "Split",
                    node("MatMul", normal, weight(f"qkv_{layer}", width, 3 * width)),
                    outputs=3,
                    axis=-1,
                )
                scores = node("MatMul", heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
                mixed = node("MatMul", node("Softmax", node("Mul", scores, scale), axis=-1), heads(value, [0, 2, 1, 3]))
                joined = node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), join)
                x = node("Add", x, node("MatMul", joined, weight(f"out_{layer}", width, width)))
                normal = node("LayerNormalization", x, ones, zeros, axis=-1)
                up = node("MatMul", normal, weight(f"up_{layer}", width, 4 * width))
                # GELU, spelled out: the operator of that name needs a newer opset than old TensorRT versions read.
                gate = node("Mul", node("Add", node("Erf", node("Div", up, root)), one), one_half)
                down = node("MatMul", node("Mul", up, gate), weight(f"down_{layer}", 4 * width, width))
                x = node("Add", x, down)

        shape = ["batch", "length", width]
        graph = helper.make_graph(
            nodes,
            self.name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT16, shape)],
            [helper.make_tensor_value_info(x, TensorProto.FLOAT16, shape)],
            weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))


#: 24 layers of width 1024: 604 MB of weights.
LARGE = Transformer(layers=24, hidden=1024, heads=16)

#: Small enough to build in well under a second.
TINY = Transformer(layers=1, hidden=64, heads=2)
