"""The formats in which quantized checkpoints are published as safetensors.

`quantization.py` reads what config.json says. A file of a family turns a module's stored tensors
into a `QuantizedMatrix`. `quantized_tensors.py` offers them by the names of plain weights, so
nothing else of the loader knows a format. `paired_experts.py` offers gpt-oss's experts in the same
way, quantized or not.

Imports `checkpoint`, and of `engine.checkpoint` the files and stored tensors.
"""
