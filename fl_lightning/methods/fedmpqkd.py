"""FedMPQ-KD: FedMPQ whose clients also distil from a full-precision copy of the weights they
received this round.

    L = L_task + lambda_b * L_bit + alpha * T^2 * KL(softmax(teacher / T) || softmax(student / T))

Hinton et al. (2015) for T^2; nothing more is uploaded than by FedMPQ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.client import Client
from fl_lightning.config.near_names import require_choice
from fl_lightning.config.overriding import overrides
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods import teaching
from fl_lightning.methods.fedmpq import FedMPQ
from fl_lightning.methods.lit_module import module_loss
from fl_lightning.methods.losses import distillation
from fl_lightning.methods.schedules import CosineSchedule, LinearSchedule, at, ends
from fl_lightning.models.recipe import copied
from fl_lightning.models.tensors import moving_buffers
from fl_lightning.quantization.activations import keep_activations
from fl_lightning.tasks import Classification
from fl_lightning.wire import Payload

Value = float | LinearSchedule | CosineSchedule


class FedMPQKD(FedMPQ):
    """In-round self-distillation against quantisation. ``alpha`` 0 is FedMPQ, bit for bit.

    Args:
        alpha: weight of the distillation term, 0 or more; a number, or a schedule over rounds.
        temperature: T, above 0; a number, or a schedule over rounds.
        kl: ``forward`` is KL(teacher || student), ``reverse`` is KL(student || teacher).
        teacher: ``frozen``; ``joint``: trained beside the student on the task loss; or a number r:
            replaced by the student's full-precision weights every r local steps.
        teacher_source: the teacher's weights: ``full``, W_t in full precision (adds the fp32
            download when ``download`` is ``quantised``), or ``received``, what the download holds
            (adds none).
        settings: those of FedMPQ. The teacher's activations are always in full precision.
    """

    stackable = True
    same_start = True
    own_terms = frozenset({"bit", "kd", "teacher"})
    refuses = {**FedMPQ.refuses, "no_classes": "it compares logits of classes"}

    def __init__(
        self,
        alpha: Value = 0.5,
        temperature: Value = 2.0,
        kl: Literal["forward", "reverse"] = "forward",
        teacher: Literal["frozen", "joint"] | int = "frozen",
        teacher_source: Literal["full", "received"] = "full",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        for value in ends(alpha):
            if not 0 <= value < math.inf:
                raise InputError(
                    f"--model.alpha {value}",
                    "a loss term weighs 0 or more",
                    "write --model.alpha 0.5",
                )
        for value in ends(temperature):
            if not 0 < value < math.inf:
                raise InputError(
                    f"--model.temperature {value}",
                    "a temperature is above 0",
                    "write --model.temperature 2",
                )
        if isinstance(teacher, bool) or not isinstance(teacher, int):
            require_choice(teacher, ("frozen", "joint"), "--model.teacher")
        elif teacher < 1:
            raise InputError(
                f"--model.teacher {teacher}",
                "refreshed every r >= 1 local steps",
                "write --model.teacher frozen",
            )
        self.alpha_schedule = alpha
        self.temperature_schedule = temperature
        self.kl = kl
        self.teacher_mode = teacher
        self.teacher_source = teacher_source

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.teacher = copied(self.network).requires_grad_(self.teacher_mode == "joint")
        keep_activations(self.teacher)
        self.alpha = self.temperature = 0.0

    def train(self, mode: bool = True) -> FedMPQKD:
        super().train(mode)
        if hasattr(self, "teacher"):
            self.teacher.eval()
        return self

    def broadcast(self, client: Client) -> Payload:
        payload = super().broadcast(client)
        if (
            self.download == "quantised"
            and self.teacher_source == "full"
            and at(self.alpha_schedule, self.round) > 0
        ):
            return Payload({**payload, "teacher": self.server["weights"]})
        return payload

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        weights = (
            message.tensor("teacher")
            if "teacher" in message
            else self.codec.decode(message, sender="server")
        )
        self.layout.write(self.teacher, weights)
        self.own.write(self.teacher, self.own.read(self.network))
        self.alpha, self.temperature = (
            at(self.alpha_schedule, self.round),
            at(self.temperature_schedule, self.round),
        )

    def work_kind(self, client: Client) -> str:
        return f"teacher {at(self.alpha_schedule, self.round) > 0}"

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield the client's batches, with the frozen teacher's logits as a third element where it
        is cheaper to have them beforehand."""
        frozen = self.teacher_mode == "frozen" and self.alpha > 0
        if (
            not frozen
            or not self._reads_logits
            or not teaching.pays(data.device, epochs, data.augments)
        ):
            yield from super().local_batches(
                data, client, epochs=epochs, labels=labels, steps=steps
            )
            return
        numbers = torch.arange(len(labels), device=labels.device)
        numbered = super().local_batches(data, client, epochs=epochs, labels=numbers, steps=steps)
        batches = (
            (data.with_labels(inputs, labels[number]), number) for inputs, number in numbered
        )
        alike = data.device.type != "cpu" and isinstance(self.task, Classification)
        ahead = teaching.AHEAD if alike else 1  # sequences of two batches differ in length
        yield from teaching.with_logits(
            self.teacher, batches, labels, repeats=not data.augments, ahead=ahead
        )

    @property
    def _reads_logits(self) -> bool:
        """Whether all that reads a batch is ours; a subclass expects pairs."""
        readers = ("local_batches", "training_step", "on_train_batch_end")
        return not any(overrides(self, FedMPQKD, name) for name in readers)

    def terms_read(self, *what: str) -> bool:
        return ("logits" in what and self.alpha > 0) or super().terms_read(*what)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """FedMPQ's terms and ``loss_kd`` = alpha * T^2 * KL, as it enters. ``batch``: inputs,
        target, and the teacher's logits if known."""
        if self.alpha == 0:
            outputs = super().training_step(batch, batch_idx)
            return {**outputs, "loss_kd": torch.zeros_like(outputs["loss"])}
        inputs, target, *known = batch
        teacher = known[0] if known else self._asked(inputs)
        weights, bit_norm = self.quantized_weights()
        task, student = self.task_and_logits((inputs, target), batch_idx, weights)
        bit = self.lambda_b * bit_norm
        kd = self.alpha * distillation(
            self.task.class_rows(student, target),
            self.task.class_rows(teacher.detach(), target).logits,
            self.temperature,
            self.kl,
        )
        outputs = {"loss": task + bit + kd, "loss_task": task, "loss_bit": bit, "loss_kd": kd}
        if self.teacher_mode == "joint":
            outputs["loss_teacher"] = (
                self.task_loss(teacher, target)
                if self.module is None
                else module_loss(self.teacher, (inputs, target), batch_idx)
            )
            outputs["loss"] = outputs["loss"] + outputs["loss_teacher"]
        return self.with_terms(outputs, (inputs, target), student)

    def _asked(self, inputs: Any) -> Tensor:
        """Return the teacher's logits; only a teacher that is trained has gradients."""
        if self.teacher_mode == "joint":
            # of a module, the pass of its own loss moves the statistics
            still = {} if self.module is None else moving_buffers(self.teacher)
            return (
                functional_call(self.teacher, still, (inputs,)) if still else self.teacher(inputs)
            )
        with torch.no_grad():
            return self.teacher(inputs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if isinstance(self.teacher_mode, int) and (batch_idx + 1) % self.teacher_mode == 0:
            self.layout.write(self.teacher, self._full_precision())
            self.own.write(self.teacher, self.own.read(self.network))

    @torch.no_grad()
    def _full_precision(self) -> Tensor:
        """Return the student's weights before rounding, as one vector."""
        return self.layout.pack(
            self.rest.unpack(self.rest.read(self.network)) | self._on_cpu(self.unrounded())
        )
