"""Study files as YAML whose keys are the text that was written: ``on``, ``0.50`` and ``1`` are names here, and so is the value ``off``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import InputError

TRUE_FALSE = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Keys are text, each given once; of the words for truth only ``true`` and ``false`` are no text (YAML 1.2)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TRUE_FALSE or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # type: ignore[override]
        self.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in result:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            result[key.value] = self.construct_object(value, deep=True)
        return result


def read_mapping(path: Path, what: str, begin: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what it should be, for the message.
        begin: how one begins.

    Raises:
        InputError: there is none, or it is not a mapping.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(f"{path}; the {what} cannot be read ({reason}); write the path of a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{where}; it is not a valid {what}: {error.problem}; mend that line") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}; it is not valid YAML: {error}; write 'key: value' lines") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}; a {what} is a mapping; begin with '{begin}'")
    return document
