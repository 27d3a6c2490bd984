"""What pyproject.toml cannot say: all packages, found, and one more whose folder lies elsewhere
(``configs/``)."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fl_lightning*", "callbacks*"]), "fl_lightning.configs"],
    package_dir={"fl_lightning.configs": "configs"},
    package_data={
        "fl_lightning.configs": ["**/*.yaml", "devices/*.csv"],
        "fl_lightning.aggregation": ["*.cpp"],
        "fl_lightning.quantization": ["*.cpp"],
        "fl_lightning.energy": ["*.json"],
        "fl_lightning.data.text": ["words.txt"],
        "fl_lightning.study.report": ["report.css", "report.js"],
        "fl_lightning.models.language": ["*.safetensors"],
    },
)
