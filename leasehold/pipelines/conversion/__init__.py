"""The kind of work `conversion`: ONNX models are checked and optimised, quantised to int8, and packaged."""
