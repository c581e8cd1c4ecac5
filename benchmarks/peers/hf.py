"""The Hugging Face Trainer (DDP through accelerate) on `LlamaForCausalLM` with SDPA: what its users run, from the same weights.

Its batches are the same packs, a row a document, so all documents are equally long. The trainer's loop runs on a thread of its own and
stops at the end of every step until the next one is asked for: drawing the next batch is already a collective, on the same group as
the clock's.
"""

import tempfile
import threading
from queue import SimpleQueue

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from trial import Trial

from longshift.dist.world import World
from longshift.spec.families import to_hugging_face
from longshift.state.precision import Precision
from peers.session import Step, adamw, pose_as_launched, weights


class Rows(Dataset):
    """Documents in the order of the steps, over and over; the model shifts the labels itself."""

    def __init__(self, trial: Trial, steps: int):
        self.steps = [[torch.from_numpy(document.ids) for document in batch.documents] for batch in trial.batches()]
        self.length = steps * len(self.steps[0])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        step, row = divmod(number, len(self.steps[0]))
        ids = self.steps[step % len(self.steps)][row]
        return {"input_ids": ids, "labels": ids}


class InOrder(Trainer):
    """The trainer without its shuffling."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]


class Gate(TrainerCallback):
    """Lets one step through at a time and hands out its loss, or the fault that ended the trainer (mutable)."""

    def __init__(self) -> None:
        self.go: SimpleQueue[None] = SimpleQueue()
        self.done: SimpleQueue[float | Exception] = SimpleQueue()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if logs and "loss" in logs:
            self.done.put(float(logs["loss"]))
            self.go.get()


def build(world: World, trial: Trial, variant: str) -> Step:
    pose_as_launched(world)
    spec, gate, steps = trial.spec, Gate(), 10**6
    config = LlamaConfig(**to_hugging_face(spec), attn_implementation="sdpa", use_cache=False)  # pyright: ignore[reportCallIssue]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights(trial), strict=True)
    optimizer = adamw(trial, dict(model.named_parameters()))  # pyright: ignore[reportArgumentType]
    rows = trial.capacity // len(trial.batches()[0].documents[0].ids)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(trial.lengths[0]) // rows // world.size,
        max_grad_norm=trial.clip or 0.0,
        bf16=Precision.of(trial.precision).compute == torch.bfloat16,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: trial.schedule.at(number) / trial.lr)
    trainer = InOrder(model, arguments, train_dataset=Rows(trial, steps), optimizers=(optimizer, schedule), callbacks=[gate])
    trainer.remove_callback(PrinterCallback)

    def loop() -> None:
        try:
            gate.go.get()
            trainer.train()
        except Exception as fault:
            gate.done.put(fault)

    threading.Thread(target=loop, daemon=True).start()

    def step(number: int) -> float:
        gate.go.put(None)
        loss = gate.done.get()
        if isinstance(loss, Exception):
            raise loss
        return loss

    return step
