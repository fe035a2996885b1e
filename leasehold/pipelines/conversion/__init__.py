"""ONNX models: checked and optimised, quantised to int8, packaged."""
