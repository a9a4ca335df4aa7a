"""Graphs as ONNX models: each op a model-local function of standard ops (docs/onnx.md)."""
