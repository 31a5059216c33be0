"""Refined models as files that run without this package: torch.export, ONNX, int8."""
