"""Quantisation of weights, updates and activations."""

from fl_lightning.quantization.allocation import allocate_bits, average_bits
from fl_lightning.quantization.uniform import (
    Quantized,
    dequantize_codes,
    prune,
    quantize,
    quantize_and_prune,
)
