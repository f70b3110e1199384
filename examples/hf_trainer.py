"""Trains a small Llama by Hugging Face's Trainer, each sequence of packed documents shared by all ranks; prints losses.

torchrun --nproc-per-node 2 examples/hf_trainer.py      # any number of ranks prints the same losses
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ringspun.integrations.trainer import RingTrainer
from ringspun.train.data.collate import Collator

TOKENS = 96

torch.manual_seed(0)  # the same weights and documents on every rank
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
documents = [torch.arange(i, i + 20 + 7 * (i % 5)).remainder(64).tolist() for i in range(24)]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        use_cpu=True,
        remove_unused_columns=False,  # a ring asks for it: collators read columns that the model does not name
        per_device_train_batch_size=4,  # documents of one micro-batch: one sequence, or two
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        ddp_find_unused_parameters=False,  # all are used; left at its default, DDP warns
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    trainer = RingTrainer(
        model,
        args,
        data_collator=Collator(
            TOKENS, overflow="error"
        ),  # says which documents each sequence has: plans are made of it
        train_dataset=documents,
        eval_dataset=documents[:6],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        losses = [f"{entry['loss']:.5f}" for entry in history if "loss" in entry]
        evaluated = [f"{entry['eval_loss']:.5f}" for entry in history if "eval_loss" in entry]
        print("losses", *losses, "evaluated", *evaluated, flush=True)
    trainer.end()
