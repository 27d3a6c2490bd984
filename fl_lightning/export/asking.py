"""Lines that ask an exported language model as its run asked it, with the same tokens before an
answer and the same end of one."""

from __future__ import annotations

import re
from typing import Any

from fl_lightning.data.text.tokens import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from fl_lightning.export.trained_model import TrainedModel

NEW_TOKENS = 64
"""Tokens of an answer where the run has generated none."""
PLACES = r"({definition}|{inputs})"


def asking_lines(model: TrainedModel) -> list[str]:
    """Return a program that continues ``load.py``, whose ``network`` has transformers'
    ``generate``; none where the data have no one form of questions, or a tokeniser of one's own.

    Args:
        model: a language model in the form of peft or transformers.
    """
    data: Any = model.data
    asked: tuple[str, ...] = getattr(data, "asked", ())
    if not asked or not isinstance(data.tokenizer, (ByteTokenizer, HuggingFaceTokenizer)):
        return []
    tokens: Tokenizer = data.tokenizer
    first = "" if tokens.bos is None else f"{tokens.bos}, "
    if model.tokenizer is None:
        tools = ["from transformers import GenerationConfig", ""]
        encode = "part.encode()"
        decode = 'bytes(id for id in answer if id < 256).decode(errors="replace")'
    else:
        tools = [
            "from transformers import AutoTokenizer, GenerationConfig",
            "",
            "tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent)",
        ]
        encode = "tokenizer.encode(part, add_special_tokens=False)"
        decode = "tokenizer.decode(answer, skip_special_tokens=True)"
    places = sorted({*re.findall(PLACES, "".join(asked))})
    bound = getattr(model.data.task, "max_new_tokens", 0)  # of preferences there is none
    most = bound or NEW_TOKENS
    return [
        *tools,
        *(f'{place[1:-1]} = "..."' for place in places),
        f"parts = [{', '.join(map(_expression, filter(None, asked)))}]",
        f"ids = [{first}*(id for part in parts for id in {encode})]",
        "network.generation_config = GenerationConfig(  # in place of the base's own penalties",
        f"    do_sample=False, max_new_tokens={most},",
        f"    eos_token_id={tokens.eos}, pad_token_id={tokens.pad},",
        ")",
        "found = network.generate(input_ids=torch.tensor([ids]))",
        "answer = found[0, len(ids) :].tolist()",
        f"print({decode})",
    ]


def _expression(part: str) -> str:
    """Return a part of a prompt as Python: texts, and the names that stand in their places."""
    texts = filter(None, re.split(PLACES, part))
    return " + ".join(text[1:-1] if re.fullmatch(PLACES, text) else repr(text) for text in texts)
