"""Makes a tiny Hugging Face checkpoint to start from: a Llama that knows nothing yet, and a tokenizer.

python examples/fine_tune/make_checkpoint.py      # into runs/tiny; any other checkpoint on your disk would do
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "tiny"

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
)
bpe.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))[:4]], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True, **sizes)
LlamaForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(f"{folder} is a checkpoint of {config.max_position_embeddings} positions, {len(tokenizer)} tokens")
