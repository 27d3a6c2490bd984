"""Networks ``hf:NAME_OR_FOLDER``: any causal language model of transformers, with adapters of peft.

They need the optional extra ``fl_lightning[language]``. No other network fetches weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings, simplefilter

import torch
from torch import Tensor, nn

from fl_lightning.config.near_names import require_choice
from fl_lightning.config.packaged import HF_PREFIX, model_folder
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.models.adapters import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    OF_SINGULAR_DIRECTIONS,
    AdapterKind,
    add_adapter,
    kind_of,
    largest_rank,
    merged_lora,
    plain_weights,
    require_directions,
)
from fl_lightning.models.language.generating import Generating
from fl_lightning.models.language.llama import (
    Llama,
    TokenInputs,
    transformers_settings,
    transformers_weights,
)

log = logging.getLogger(__name__)
PRECISIONS = ("float32", "bfloat16", "float16")
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
"""Settings of bitsandbytes for a base of 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""
PEFT_DEFAULT = "peft-default"
"""The targets that peft has for an architecture where none are named."""


class TransformersLM(Generating):
    """A causal language model of transformers, with adapters on a frozen base, of peft where it has
    them.

    Adapters are drawn from torch's current generator. ``model`` is peft's ``PeftModel``, or without
    adapters the ``PreTrainedModel``; ``model.save_pretrained(folder)`` writes what peft and
    transformers read.

    Args:
        num_classes: number of tokens of the data, at most the model's.
        name: name on the Hugging Face hub; a folder that ``save_pretrained`` wrote, or
            ``package:NAME``, an installed Python package that carries the model, for which nothing
            is fetched.
        rank: r of the adapters; 0: no adapters, all weights are trained. A list: client i has entry
            i modulo its length, where ``adapter_average`` takes that.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear``, all linear layers but the output layer; ``peft-default``, those
            that peft adapts in this architecture, such as q_proj and v_proj of Llama; or names of
            layers as peft takes them, such as ``[q_proj, v_proj]``.
        ffa: FFA-LoRA: A is frozen, and B alone is trained and travels; the same as ``adapter:
            ffa``.
        dtype: precision of the weights. Adapters on a narrower base are float32.
        gguf_file: the file in the folder, where the weights are GGUF.
        load_in_4bit: whether the frozen base is quantised to 4 bits by bitsandbytes.
        gradient_checkpointing: whether activations are computed again in the backward pass, which
            takes less memory and more time.
        adapter: kind of the adapters: lora, ffa, pissa and adalora are peft's; svft and spectral
            are those of :mod:`fl_lightning.models.adapters`, on layers that are ``nn.Linear`` with
            whole weights.

    Raises:
        InputError: the extra is not installed, the model cannot be loaded, its vocabulary is too
            small, no layer has a name of ``targets``, or 4 bits are asked for where they do not
            work.
    """

    reads_tokens = True
    """Declares to ``build_network`` that examples are token ids and outputs are ``[B, T, V]``."""
    pads_prompts_left = True
    """Declares that ``generate`` moves the padding of prompts to their left."""
    in_4bit = False
    """Whether the linear layers of the base, but the output layer, have 4 bits."""
    read_as: torch.dtype = torch.float32
    """The precision in which the weights are read, of which those 4 bits are."""

    def __init__(
        self,
        num_classes: int,
        name: str,
        rank: int | list[int] = DEFAULT_RANK,
        alpha: float = DEFAULT_ALPHA,
        targets: str | Sequence[str] = ALL_LINEAR,
        ffa: bool = False,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        gguf_file: str | None = None,
        load_in_4bit: bool = False,
        gradient_checkpointing: bool = False,
        adapter: AdapterKind = "lora",
    ) -> None:
        super().__init__()
        self.client_ranks = rank if isinstance(rank, list) else []
        kind = kind_of(adapter, ffa)
        rank = largest_rank(rank, kind)
        check_adapters(name, rank, alpha)
        require_choice(dtype, PRECISIONS, "dtype")
        self.in_4bit, self.read_as = load_in_4bit, getattr(torch, dtype)
        if load_in_4bit and not shapes_alone():
            _require_4bit(name, rank, kind)
        model = load(name, dtype, "CausalLM", **_special(gguf_file, load_in_4bit))
        for layer in model.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                # else an evaluation on a CPU packs the weights in a form that no training and no
                # card reads
                layer.support_avx512bf16_for_cpu = False
        check_vocabulary(f"{HF_PREFIX}{name}", model.config, num_classes)
        # these names of transformers, which peft uses too, change with version 6
        with catch_warnings():
            simplefilter("ignore", FutureWarning)
            # peft sees by itself what GPT-2 needs
            filterwarnings("ignore", "fan_in_fan_out is set to")
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model: Any = model if rank == 0 else adapt(model, name, kind, rank, alpha, targets)
        self.name, self.positions = name, learned_positions(model.config)
        self.gguf_file = gguf_file

    def forward(self, inputs: TokenInputs) -> Tensor:
        """Return the logits ``[B, T, V]`` of the next token at each position.

        Args:
            inputs: ids int64 ``[B, T]``, or a dictionary with ``input_ids`` and perhaps
                ``attention_mask``. Padding stands on the right, where causal attention keeps it
                from the text: the mask is not read.

        Raises:
            InputError: there are more tokens than the model has positions.
        """
        ids = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
        require(
            self.positions is None or ids.shape[1] <= self.positions,
            f"{HF_PREFIX}{self.name} on sequences of {ids.shape[1]} tokens",
            f"it has learned {self.positions} positions",
            f"write --data.context {self.positions}, or take a model with more",
        )
        return self.model(input_ids=ids, use_cache=False).logits

    @property
    def base(self) -> Any:
        """The ``PreTrainedModel``, whose layers hold the adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def continued(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        """Return what ``generate`` returns. Where the model has learned positions, as GPT-2 has, a
        sequence ends when they are used up, and ``filler`` follows: no true answer is longer, if
        prompt and answer fit into a context that the model has positions for."""
        if self.positions is None:
            return self._with_transformers(ids, lengths, max_new_tokens, eos, filler)
        # the last token takes no position
        left = (self.positions + 1 - lengths).clamp(1, max_new_tokens)
        found = torch.full((len(ids), int(left.max())), filler, dtype=ids.dtype, device=ids.device)
        longest = 0
        # a single one, unless a prompt is near the end of the positions
        for bound in left.unique().tolist():
            rows = (left == bound).nonzero()[:, 0]
            width = int(lengths[rows].max())
            new = self._with_transformers(ids[rows, :width], lengths[rows], bound, eos, filler)
            found[rows, : new.shape[1]] = new
            longest = max(longest, new.shape[1])
        return found[:, :longest]

    def _with_transformers(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        """Return the greedy continuation of prompts ``[B, T]`` that are padded on the right."""
        from transformers import GenerationConfig

        length = ids.shape[1]
        places = torch.arange(length, device=ids.device) - (length - lengths).unsqueeze(1)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=filler
        )
        training, own = self.model.training, self.base.generation_config
        self.model.eval()  # gradient checkpointing keeps no cache in training mode
        # else the model's own eos and penalties count too
        self.base.generation_config = GenerationConfig()
        try:
            found = self.model.generate(  # padding on the left, as transformers wants it
                input_ids=ids.gather(1, places.clamp(min=0)),
                attention_mask=(places >= 0).long(),
                generation_config=config,
            )
        finally:
            self.model.train(training)
            self.base.generation_config = own
        return found[:, length:]


def to_transformers(network: Llama, *, merge: bool = True) -> Any:
    """Return transformers' ``LlamaForCausalLM`` of the same logits, with adapters merged into the
    weights.

    Its ``save_pretrained(folder)`` writes a folder for ``hf:FOLDER`` and for other programs.

    Args:
        network: the network.
        merge: false: what the adapters add is left out.

    Raises:
        InputError: transformers is not installed.
    """
    _require_extra(f"{type(network).__name__} for transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**transformers_settings(network)))
    with merged_lora(network) if merge else nullcontext():
        model.load_state_dict(transformers_weights(plain_weights(network)))
    return model


def learned_positions(config: Any) -> int | None:
    """Return the number of positions that a model of transformers has learned, and cannot exceed;
    None where they are computed, such as rotary ones."""
    rotary = any(
        getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta")
    )
    return None if rotary else getattr(config, "max_position_embeddings", None)


def _require_extra(wanted: str) -> None:
    missing = [
        package for package in ("transformers", "peft", "accelerate") if find_spec(package) is None
    ]
    require(
        not missing,
        f"{wanted} without {', '.join(missing)}",
        "models of Hugging Face need the optional extra",
        "run pip install 'fl_lightning[language]'",
    )


def _require_4bit(name: str, rank: int, kind: AdapterKind = "lora") -> None:
    """Refuse 4-bit weights where they do not work."""
    require(
        find_spec("bitsandbytes") is not None,
        f"load_in_4bit of {HF_PREFIX}{name} without bitsandbytes",
        "4-bit weights are those of bitsandbytes",
        "run pip install bitsandbytes, or write load_in_4bit: false",
    )
    require(
        rank > 0,
        f"load_in_4bit of {HF_PREFIX}{name} with rank 0",
        "4-bit weights are frozen, so that adapters alone can be trained",
        f"write rank: {DEFAULT_RANK}",
    )
    require(
        kind not in OF_SINGULAR_DIRECTIONS,
        f"load_in_4bit of {HF_PREFIX}{name} with adapter {kind}",
        "it takes singular directions of whole weights",
        "write load_in_4bit: false, or adapter: lora",
    )


def check_adapters(name: str, rank: int, alpha: float) -> None:
    """Refuse a network where its libraries are not installed, or adapters that cannot be.

    Raises:
        InputError: something is missing or out of range.
    """
    _require_extra(f"network {HF_PREFIX}{name}")
    require(
        rank >= 0 and alpha > 0,
        f"rank={rank}, alpha={alpha}",
        "adapters have a rank of 1 or more and a positive alpha; rank 0 means none",
        f"write rank {DEFAULT_RANK} and alpha {DEFAULT_ALPHA:g}",
    )


def check_vocabulary(given: str, config: Any, num_classes: int) -> None:
    """Refuse a model that has fewer tokens than the data, and warn of one that has more than twice
    as many.

    A model's table is filled up to a round number; twice as many tokens are those of another
    tokeniser.
    """
    require(
        num_classes <= config.vocab_size,
        f"{given} of {config.vocab_size} tokens on data of {num_classes} tokens",
        "the data's tokens are tokens of the model",
        "take the data's tokeniser from the model",
    )
    has_data = num_classes > 1  # a calibration has none
    if has_data and config.vocab_size > 2 * num_classes and parent_process() is None:
        log.warning(
            "%s knows %d tokens and the data have %d: to the model they are other texts; write"
            " --data.tokenizer hf: and the model's name",
            given,
            config.vocab_size,
            num_classes,
        )


def _special(gguf_file: str | None, load_in_4bit: bool) -> dict[str, Any]:
    """Return the settings of :func:`load` for weights of other kinds."""
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    if load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **NF4)
        options["device_map"] = {"": "cpu"}  # as all networks are made; a run moves them
    return options


def layers_in_4bit(network: nn.Module) -> tuple[str, ...]:
    """Return how the names of tensors begin whose layers have 4 bits: bitsandbytes writes and does
    not read them, and whoever makes the network has them."""
    layers = network.named_modules()  # peft's layers around them have the same name
    return tuple(
        f"{name}." for name, one in layers if type(one).__module__.startswith("bitsandbytes.")
    )


def shapes_alone() -> bool:
    """Return whether networks are made on torch's device ``meta``, without values."""
    return torch.get_default_device().type == "meta"


def load(
    name: str, dtype: str, kind: Literal["CausalLM", "SequenceClassification"], **options: Any
) -> Any:
    """Return the model of a name or folder; on the device ``meta`` one of its configuration alone,
    without weights. 4-bit weights are float32 ones there, as everything else is that bitsandbytes
    leaves.

    Args:
        name: name, folder or ``package:NAME``.
        dtype: precision of the weights.
        kind: what the model is for.
        options: further arguments of ``from_pretrained``.

    Raises:
        InputError: transformers cannot load it, or it holds adapters, which new ones would replace.
    """
    import transformers
    from transformers.utils import logging

    name = model_folder(name)
    require(
        not Path(name, "adapter_config.json").is_file(),
        f"network {HF_PREFIX}{name}",
        "the folder holds adapters, and new ones would take their place",
        "write a whole model by export --format transformers, and name that folder",
    )
    local, level = Path(name).is_dir(), logging.get_verbosity()
    options |= {"dtype": getattr(torch, dtype), "local_files_only": local}
    if kind == "SequenceClassification":  # a head that is new is what is expected, and no news
        logging.set_verbosity_error()
    try:  # a download is worth a bar, the reading of a file is not
        with without_bars() if local else nullcontext():
            if shapes_alone():
                wide = options.pop("quantization_config", None) is not None
                kept = torch.float32 if wide else options["dtype"]
                options.pop("dtype")
                config = transformers.AutoConfig.from_pretrained(name, **options)
                return getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=kept)
            return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(name, **options)
    except Exception as error:  # transformers' errors for a bad name have no common type
        text = " ".join(str(error).split())[:200]
        what = {
            "CausalLM": "a causal language model",
            "SequenceClassification": "a language model",
        }[kind]
        raise InputError(
            f"network {HF_PREFIX}{name}: {type(error).__name__} ({text})",
            f"it is the name of {what} on the hub, or a folder that save_pretrained wrote",
            "correct the name, or download the model into a folder",
        ) from error
    finally:
        logging.set_verbosity(level)


@contextmanager
def without_bars() -> Iterator[None]:
    """Return a context in which transformers shows no progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def adapt(
    model: Any,
    name: str,
    kind: AdapterKind,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    heads: Sequence[str] = (),
) -> nn.Module:
    """Return the model with a frozen base and adapters.

    Args:
        model: a model of transformers.
        name: its name, for messages.
        kind: kind of the adapters.
        rank: r of the adapters.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear``, or names of layers.
        heads: of a classifier, names of the layers that are trained whole.

    Raises:
        InputError: no layer has a name of ``targets``, or the adapter does not go together with the
            model.
    """
    if kind in ("svft", "spectral"):
        require(
            targets != PEFT_DEFAULT,
            f"targets={targets!r} with adapter {kind}",
            "it is no adapter of peft",
            f"write {ALL_LINEAR}",
        )
        adapted = _adapt_with_ours(model, kind, rank, targets)
        for head in heads:
            adapted.get_submodule(head).requires_grad_(True)
        return adapted
    from peft import get_peft_model, prepare_model_for_kbit_training

    if getattr(model, "is_loaded_in_4bit", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = _peft_config(
        kind, rank, alpha, targets if isinstance(targets, str) else list(targets), heads
    )
    given = f"targets={targets!r} for {HF_PREFIX}{name}"
    with as_bad_input(given, "peft refuses them", f"write {ALL_LINEAR}", ValueError):
        adapted = get_peft_model(model, config)
    for place, module in adapted.named_modules():
        layer = place.removeprefix("base_model.model.")
        if kind == "pissa" and getattr(module, "lora_A", None):  # peft takes fewer in silence
            require_directions(kind, layer, module, rank)
        require(
            kind != "ffa" or not getattr(module, "lora_embedding_A", None),
            f"{given} with adapter ffa",
            f"A of an embedding starts at zero, and {layer} would never learn",
            "leave it out of targets, or write adapter lora",
        )
    frozen = {"ffa": ("lora_A",), "adalora": ("ranknum",)}.get(kind, ())
    # peft would train ranknum on a bfloat16 base
    for parameter, weight in adapted.named_parameters():
        is_frozen = any(part in frozen for part in parameter.split("."))
        weight.requires_grad_(weight.requires_grad and not is_frozen)
    return adapted


def _peft_config(
    kind: AdapterKind, rank: int, alpha: float, targets: str | list[str], heads: Sequence[str]
) -> Any:
    """Return peft's settings of a kind of adapter. AdaLoRA's schedule in them is not used."""
    from peft import AdaLoraConfig, LoraConfig

    both: dict[str, Any] = {"lora_alpha": alpha, "bias": "none"}
    both["target_modules"] = None if targets == PEFT_DEFAULT else targets
    both["task_type"] = "SEQ_CLS" if heads else "CAUSAL_LM"
    if heads:
        both["modules_to_save"] = list(heads)
    if kind == "adalora":
        return AdaLoraConfig(init_r=rank, target_r=rank, total_step=1, **both)
    return LoraConfig(r=rank, init_lora_weights="pissa" if kind == "pissa" else True, **both)


def _adapt_with_ours(
    model: Any, kind: AdapterKind, rank: int, targets: str | Sequence[str]
) -> nn.Module:
    """Return the model with adapters of our own; as with peft's, all linear layers are all but the
    head.
    """
    head = model.get_output_embeddings()
    if targets == ALL_LINEAR:
        targets = [
            layer
            for layer, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ]
    return add_adapter(model, kind, rank, targets=targets)
