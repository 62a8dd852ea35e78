"""Trains a draft model to draft a block of tokens in one pass (PARD, arXiv 2504.18583), and writes it as an adapter.

Behind an answer's token it reads mask tokens, and learns to say at each what the target says so many tokens later; at
the answer's own tokens it goes on learning the target's next one. What is trained is a LoRA (arXiv 2106.09685) on all
linear layers and the mask's embedding. The texts are those of draft_data.py. A run continues from its checkpoint, which
is written every five minutes, and ends after the given hours of training in all.

    scripts/train_draft SOURCE.gguf TEXTS.jsonl ... ADAPTER.gguf [--hours H] [--checkpoint FILE]
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from itertools import count as numbers
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch.nn import functional

# The size of a LoRA (19 MB at rank 32 in 8 bits), and what its product is multiplied by.
_RANK, _SCALE = 32, 2.0
# 74 steps with 1e-3 cost the next token .05 of its accuracy for good; 3e-4 from the first step on costs .01 at first.
_LEARNING_RATE, _WARM_UP, _DECAY = 3e-4, 30, 0.4
# How many masks follow a token, drawn anew for each batch: far ones are rarely reached, so they are trained less often
# (PARD's conditional drop), and count less.
_MASKS, _SHARES, _FADE = (2, 3, 5, 7), (0.3, 0.25, 0.2, 0.25), 0.9
_BLOCK_LENGTH = 8
# Rows of a text in a pass.
_ROWS = 900
# Most prompts are cut to as many tokens as a server's draft model reads of them (loading.py).
_PROMPT, _CUT = 96, 0.75
_CHECKPOINT_SECONDS = 300
_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gu": ("ffn_gate", "ffn_up"),
    "d": ("ffn_down",),
}


class Text(NamedTuple):
    """Tokens, and what may follow each from `first` on: up to four tokens with their probabilities."""

    tokens: list[int]
    first: int
    top: list[list[int]]
    p: list[list[float]]


class Draft(torch.nn.Module):
    """A Qwen2 from a GGUF, whose real rows and mask rows are computed in one pass."""

    def __init__(self, reader: gguf.GGUFReader, device: torch.device) -> None:
        super().__init__()
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture != "qwen2":
            raise SystemExit(f"Only qwen2 can be trained, and this is {architecture}.")
        value = {key.removeprefix("qwen2."): field.contents() for key, field in reader.fields.items()}
        self.layers, self.width = int(value["block_count"]), int(value["embedding_length"])
        self.heads, self.kv_heads = int(value["attention.head_count"]), int(value["attention.head_count_kv"])
        self.base, self.epsilon = (
            float(value.get("rope.freq_base", 10_000)),
            float(value["attention.layer_norm_rms_epsilon"]),
        )
        tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
        weights = {name: tensor.to(device, torch.bfloat16) for name, tensor in tensors.items()}
        self.embedding = weights["token_embd.weight"]
        self.head = weights.get("output.weight", self.embedding)
        self.norm = weights["output_norm.weight"]
        self.block: list[dict[str, torch.Tensor]] = []
        self.A, self.B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        self.mask = torch.nn.Parameter(self.embedding.float().mean(0))
        for layer in range(self.layers):
            linear = {
                part: torch.cat([weights[f"blk.{layer}.{name}.weight"] for name in names])
                for part, names in _PARTS.items()
            }
            for part, weight in linear.items():
                rows, columns = weight.shape
                noise = torch.randn(_RANK, columns, device=device) / math.sqrt(columns)
                self.A[f"{part}{layer}"] = torch.nn.Parameter(noise)
                self.B[f"{part}{layer}"] = torch.nn.Parameter(torch.zeros(rows, _RANK, device=device))
            linear["bias"] = torch.cat([weights[f"blk.{layer}.{name}.bias"] for name in _PARTS["qkv"]])
            linear |= {norm: weights[f"blk.{layer}.{norm}.weight"] for norm in ("attn_norm", "ffn_norm")}
            self.block.append(linear)

    def linear(self, x: torch.Tensor, layer: int, part: str) -> torch.Tensor:
        a, b = (parameters[f"{part}{layer}"].to(x.dtype) for parameters in (self.A, self.B))
        bias = self.block[layer]["bias"] if part == "qkv" else None
        return functional.linear(x, self.block[layer][part], bias) + functional.linear(
            functional.linear(x, a), b * _SCALE
        )

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (self.width,), weight.float(), self.epsilon).to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor, anchors: torch.Tensor, masks: int) -> torch.Tensor:
        """The hidden states of the tokens, then of the masks that follow each anchor, shape (rows, width)."""
        length, count, heads, kv = len(tokens), len(anchors), self.heads, self.kv_heads
        behind, group, device = count * masks, heads // kv, tokens.device
        x = torch.cat((self.embedding[tokens].float(), self.mask.expand(behind, -1)))
        steps = torch.arange(1, masks + 1, device=device)
        place = torch.arange(length, device=device)
        position = torch.cat((place, (anchors[:, None] + steps).flatten())).float()
        size = self.width // heads
        angle = position[:, None] * self.base ** (-torch.arange(0, size, 2, device=device) / size)
        cosine, sine = (torch.cat((part, part), -1).to(torch.bfloat16) for part in (angle.cos(), angle.sin()))
        # A token sees those before it; a mask sees those up to its anchor, and the masks between.
        earlier = _hidden(place[None] > place[:, None])
        until_anchor = _hidden((place > anchors[:, None]).repeat_interleave(masks, 0))
        between = _hidden(steps[None] > steps[:, None]).repeat(count, 1)
        seen = torch.cat((until_anchor, between), -1)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cosine + torch.cat((-second, first), -1) * sine

        for layer, block in enumerate(self.block):
            mixed = self.linear(self.normed(x, block["attn_norm"]), layer, "qkv")
            q, k, v = mixed.view(len(x), -1, size).transpose(0, 1).split((heads, kv, kv))
            q, k = rotated(q) * size**-0.5, rotated(k)
            q_real, q_mask = q[:, :length].reshape(kv, -1, size), q[:, length:].reshape(kv, -1, size)
            k_real, k_mask, v_real, v_mask = k[:, :length], k[:, length:], v[:, :length], v[:, length:]
            weights = torch.softmax((q_real @ k_real.mT).view(kv, group, length, length) + earlier, -1)
            real = (weights.view(kv, -1, length) @ v_real).view(heads, length, size)
            own = q_mask.view(kv, group, count, masks, size) @ k_mask.reshape(kv, 1, count, masks, size).mT
            far = (q_mask @ k_real.mT).view(kv, group, behind, length)
            weights = torch.softmax(torch.cat((far, own.reshape(kv, group, behind, masks)), -1) + seen, -1)
            masked = (weights[..., :length].reshape(kv, -1, length) @ v_real).view(heads, behind, size)
            near = weights[..., length:].reshape(kv, group, count, masks, masks)
            masked = masked + (near @ v_mask.reshape(kv, 1, count, masks, size)).reshape(heads, behind, size)
            x = x + self.linear(torch.cat((real, masked), 1).transpose(0, 1).reshape(len(x), -1), layer, "o")
            gate, up = self.linear(self.normed(x, block["ffn_norm"]), layer, "gu").chunk(2, -1)
            x = x + self.linear(functional.silu(gate) * up, layer, "d")
        return self.normed(x, self.norm)


def _hidden(condition: torch.Tensor) -> torch.Tensor:
    return torch.zeros(condition.shape, dtype=torch.bfloat16, device=condition.device).masked_fill(
        condition, -torch.inf
    )


def read_texts(files: list[Path]) -> list[Text]:
    lines = (json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines())
    texts = [Text(line["prompt"] + line["answer"], len(line["prompt"]), line["top"], line["p"]) for line in lines]
    return [text for text in texts if len(text.tokens) - text.first > 2 * _BLOCK_LENGTH]


def endless(texts: list[Text], skipped: int) -> Iterator[Text]:
    """All texts again and again, each time in another order, from the one after those skipped."""
    for number in numbers(skipped):
        epoch, index = divmod(number, len(texts))
        order = list(range(len(texts)))
        random.Random(epoch).shuffle(order)
        yield texts[order[index]]


def loss_of(draft: Draft, head: torch.Tensor, column: torch.Tensor, text: Text, generator: random.Random) -> Any:
    """The cross-entropy with the target's distributions, summed; and how often the likeliest token was right."""
    device = head.device
    cut = text.first - _PROMPT
    if cut > 0 and generator.random() < _CUT:
        text = text._replace(tokens=text.tokens[cut:], first=_PROMPT)
    room = max(200, _ROWS - len(text.tokens))
    masks = generator.choices(_MASKS, _SHARES)[0]
    begins = range(text.first - 1, len(text.tokens) - 1 - masks)
    anchors = torch.tensor(generator.sample(begins, min(len(begins), room // masks)), device=device)
    tokens = torch.tensor(text.tokens, device=device)
    hidden = draft(tokens, anchors, masks)
    real = torch.arange(text.first - 1, len(tokens) - 1, device=device)
    behind = (anchors[:, None] + torch.arange(2, masks + 2, device=device)).flatten()
    logits = functional.linear(torch.cat((hidden[real], hidden[len(tokens) :])), head).float()
    # By place in the answer, the target's choices and their probabilities, which are made to sum to 1.
    place = torch.cat((real + 1, behind)) - text.first
    choices = column[torch.tensor(text.top, device=device)][place]
    p = torch.tensor(text.p, device=device)[place]
    fade = _FADE ** torch.arange(masks, device=device)
    weight = torch.cat((torch.ones(len(real), device=device), fade.repeat(len(anchors))))
    entropy = -(functional.log_softmax(logits, -1).gather(1, choices) * (p / p.sum(1, keepdim=True))).sum(1)
    right = (logits.argmax(-1) == column[tokens[torch.cat((real + 1, behind))]]).float()
    accuracy = [right[: len(real)].mean().item(), *right[len(real) :].view(-1, masks)[:, :2].mean(0).tolist()]
    return (entropy * weight).sum() / weight.sum(), accuracy, len(behind)


def train(draft: Draft, texts: list[Text], options: argparse.Namespace) -> None:
    """Train for the hours that are left, and save a checkpoint every five minutes and in the end."""
    device = draft.mask.device
    # Tokens that no text has are left out of the softmax.
    known = sorted(
        {
            *range(min(12_000, len(draft.embedding))),
            *(t for text in texts for t in text.tokens),
            *(t for x in texts for y in x.top for t in y),
        }
    )
    column = torch.full((len(draft.embedding),), -1, device=device)
    column[known] = torch.arange(len(known), device=device)
    head = draft.head[known].contiguous()
    optimiser = torch.optim.AdamW(draft.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0)
    state: dict[str, float] = {"step": 0, "rows": 0, "seconds": 0.0}
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        draft.load_state_dict(saved["draft"])
        optimiser.load_state_dict(saved["optimiser"])
        state = saved["state"]
    budget, last_saved, shown = 3600 * options.hours, time.monotonic(), []
    following, generator = endless(texts, int(state["step"]) * options.batch), random.Random(int(state["step"]))
    while state["seconds"] < budget:
        began = time.monotonic()
        optimiser.zero_grad()
        for _ in range(options.batch):
            loss, accuracy, rows = loss_of(draft, head, column, next(following), generator)
            (loss / options.batch).backward()
            shown.append([loss.item(), *accuracy])
            state["rows"] += rows
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        left = 1 - state["seconds"] / budget
        for group in optimiser.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, (state["step"] + 1) / _WARM_UP, max(0.05, left / _DECAY))
        optimiser.step()
        state["step"] += 1
        state["seconds"] += time.monotonic() - began
        if state["step"] % 20 == 0:
            loss_now, *accurate = np.mean(shown, axis=0)
            each = ", ".join(f"{share:.3f}" for share in accurate)
            print(
                f"{state['seconds']:.0f} s, {state['rows']:.0f} mask rows: loss {loss_now:.3f}, right {each}",
                flush=True,
            )
            shown.clear()
        if time.monotonic() - last_saved > _CHECKPOINT_SECONDS or state["seconds"] >= budget:
            part = options.checkpoint.with_suffix(".part")
            torch.save({"draft": draft.state_dict(), "optimiser": optimiser.state_dict(), "state": state}, part)
            part.replace(options.checkpoint)
            last_saved = time.monotonic()


def write(draft: Draft, reader: gguf.GGUFReader, mask_token: int, path: Path) -> None:
    """Write what was trained in 8 bits, as the configuration's `adapter` (specserve/weights/adapter.py)."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _RANK * _SCALE)
    writer.add_mask_token_id(mask_token)
    writer.add_array("specserve.mask_embedding", draft.mask.detach().float().cpu().tolist())
    writer.add_uint32("specserve.block_length", _BLOCK_LENGTH)
    rows, kind = {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors}, gguf.GGMLQuantizationType.Q8_0
    for layer in range(draft.layers):
        for part, names in _PARTS.items():
            a, b = (parameters[f"{part}{layer}"].detach().float().cpu() for parameters in (draft.A, draft.B))
            weights = [f"blk.{layer}.{name}.weight" for name in names]
            for weight, own in zip(weights, b.split([rows[weight] for weight in weights]), strict=True):
                for name, values in (("lora_a", a), ("lora_b", own)):
                    writer.add_tensor(f"{weight}.{name}", quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the draft model as published, a GGUF")
    parser.add_argument("texts", type=Path, nargs="+", help="files of draft_data.py")
    parser.add_argument("out", type=Path, help="GGUF to write: the `adapter` of the draft in a configuration")
    parser.add_argument("--hours", type=float, default=8.0, help="of training in all (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("draft.pt"), help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="texts a step (%(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    reader = gguf.GGUFReader(options.source)
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    unused = [token for token, kind in enumerate(kinds) if kind == gguf.TokenType.UNUSED]
    if not unused:
        raise SystemExit(f"{options.source} has no unused token that could be the mask.")
    draft = Draft(reader, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    train(draft, read_texts(options.texts), options)
    write(draft, reader, unused[-1], options.out)


if __name__ == "__main__":
    main()
