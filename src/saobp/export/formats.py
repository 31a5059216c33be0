"""Writes a model as a program of ``torch.export`` or as ONNX, and opens either to run it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from saobp.export.token_model import MOST_ROWS, TokenModel
from saobp.extras import import_optional
from saobp.storage.atomic import first_line

Run = Callable[..., tuple[Tensor, ...]]
"""From int64 inputs ``[batch, length]`` to outputs."""

FILES = {"exported": "model.pt2", "onnx": "model.onnx", "executorch": "model.pte"}
PACKAGES = {"exported": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch",)}
ROWS = {"exported": MOST_ROWS, "onnx": MOST_ROWS, "executorch": 8}
"""Largest batch: ExecuTorch plans memory for it."""


def check_packages(form: str) -> None:
    """Raises where a package that the form needs is not installed."""
    for package in PACKAGES[form]:
        import_optional(package, f"an export to {form}")


def exported_program(model: TokenModel, rows: int = MOST_ROWS) -> ExportedProgram:
    """The model traced with dynamic batch and length. Raises ValueError where it cannot be traced."""
    sizes = {0: Dim("batch", min=1, max=rows), 1: Dim("length", min=1, max=model.longest)}
    shapes = {"tensors": tuple(sizes for _ in model.inputs)}
    example = model.batch(3, min(7, model.longest))
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(model.forward, example, dynamic_shapes=shapes, strict=False)
    except Exception as problem:
        raise ValueError(
            f"{type(model.model).__name__} cannot be exported with any batch and length; torch.export says: "
            f"{first_line(problem)}"
        ) from problem


def write_exported(program: ExportedProgram, path: Path) -> Run:
    """Save a program, and open what was saved."""
    torch.export.save(program, path)
    module = torch.export.load(path).module()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = module(*tensors)
        return outputs

    return run


def write_executorch(program: ExportedProgram, path: Path) -> Run:
    """Lower a program to ExecuTorch's portable kernels, and open it with its runtime."""
    with _quiet():
        exir = import_optional("executorch.exir", "an export to executorch")
        options = exir.EdgeCompileConfig(_check_ir_validity=False)
        lowered = exir.to_edge_transform_and_lower(program, compile_config=options).to_executorch()
        path.write_bytes(lowered.buffer)
        runtime = import_optional("executorch.runtime", "an export to executorch").Runtime.get()
        method = runtime.load_program(path).load_method("forward")

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.clone() for output in method.execute(list(tensors)))

    return run


def write_onnx(program: ExportedProgram, model: TokenModel, path: Path, *, int8: bool, threads: int) -> Run:
    """Write ONNX, with int8 weights if asked, and open it with onnxruntime."""
    names: dict[str, Any] = {"input_names": list(model.inputs), "output_names": list(model.outputs)}
    with _quiet():
        written = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    assert written is not None
    written.save(path)
    if int8:
        quantize(path)
    return open_onnx(path, threads)


def open_onnx(path: Path, threads: int) -> Run:
    """A session of onnxruntime on the CPU."""
    runtime = import_optional("onnxruntime", "running ONNX")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return tuple(torch.from_numpy(output) for output in session.run(None, feed))

    return run


def quantize(path: Path) -> None:
    """Replace the weights of matrix products and embeddings by int8; activations are quantised as they come.

    Shapes noted inside the graph are taken out first: of transposed weights they would be wrong afterwards.
    """
    quantization = import_optional("onnxruntime.quantization", "int8")
    model = import_optional("onnx", "int8").load(path)
    del model.graph.value_info[:]
    with _quiet():
        quantization.quantize_dynamic(model, path, weight_type=quantization.QuantType.QInt8, per_channel=True)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' notes on packages that are not there and on what they assume."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
