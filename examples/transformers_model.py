"""A Transformers model with attn_implementation="fa2tune": steps on packed documents, then generation from padded prompts.

python examples/transformers_model.py    # on a GPU, in bf16; a small Llama with random weights, nothing is downloaded
TRITON_INTERPRET=1 python examples/transformers_model.py --hidden 32 --layers 1 --steps 2    # without one, slow
"""

import argparse
import os

import torch
import transformers

import fa2tune.compat.transformers  # registers attn_implementation="fa2tune"  # noqa: F401

DOCUMENTS = ("To be, or not to be", "that is the question", "Whether 'tis nobler in the mind to suffer", "To die")


def train(hidden: int = 512, layers: int = 4, steps: int = 100, lr: float = 1e-3) -> tuple[list[float], list[str]]:
    """-> the loss of every step, and prompts as the model continues them."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, pad_token_id=0,
        num_attention_heads=max(2, hidden // 64), num_key_value_heads=max(1, hidden // 128),
    )  # fmt: skip
    # of a checkpoint: AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa2tune")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fa2tune").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    # one row without padding; position_ids restart, and cu_seq_lens_q and cu_seq_lens_k say where documents begin
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batch = collate([{"input_ids": list(text.encode())} for text in DOCUMENTS])
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    losses = []
    for step in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step:4}  loss {losses[-1]:.3f}", flush=True)

    prompts = [list(text.encode())[:6] for text in DOCUMENTS[:2]] + [list(b"To d")]
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=device)  # padded on the left
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        found = model.eval().generate(tokens, attention_mask=tokens.ne(0).long(), max_new_tokens=8, do_sample=False)
    return losses, [bytes(row).decode(errors="replace").lstrip("\0") for row in found.tolist()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"hidden": 512, "layers": 4, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    print(*train(**vars(parser.parse_args()))[1], sep="\n")
