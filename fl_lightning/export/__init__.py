"""A trained model taken home: its weights by name, and files that other programs load without this
package.

| format | writes | loaded by |
|---|---|---|
| ``safetensors`` | ``model.safetensors`` with named tensors | torch and the library of the network |
| ``peft`` | ``adapter_config.json`` and ``adapter_model.safetensors`` | peft |
| ``transformers`` | ``config.json`` and ``model.safetensors``, adapters merged | ``from_pretrained`` |
| ``onnx`` | ``model.onnx`` | any ONNX runtime |

Beside them stand ``load.py``, ``README.md`` and ``export.json``.
"""

from fl_lightning.export.command import Target, export_checkpoint
from fl_lightning.export.formats import FORMATS, FormatName
from fl_lightning.export.trained_model import TrainedModel
