"""A tiny Llama and an EAGLE draft for it, trained on the spot.

    python -m tests.engine.pair FOLDER [--shape cpu|gpu]

Writes FOLDER/target and FOLDER/draft as Hugging Face checkpoints and FOLDER/prompts.json. One byte
is one token, so that a text's length is its token count. The target learns two invented languages,
one in small letters and one in capitals; the draft learns the first alone, from the target's own
hidden states. So a prompt chooses whether speculation pays: drafts of small letters are mostly
accepted, drafts of capitals hardly ever, as after a shift of a real workload.

Needs torch, safetensors and tokenizers: run it in an engine's environment.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOS, EOS, VOCABULARY = 256, 257, 320  # bytes, two marks, and up to a multiple of 64 for SGLang
CONTEXT = 4096
ROPE_BASE = 10_000.0
EPSILON = 1e-5
PROMPT_BYTES = 24
PROMPTS = 16
UNROLLED = 3  # draft steps that the draft is trained for


@dataclass(frozen=True)
class Shape:
    """Sizes of target and draft: head size 128 is what kernels for a GPU are carried for."""

    hidden: int = 64
    inner: int = 192
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16


SHAPES = {
    "cpu": Shape(),
    "gpu": Shape(hidden=256, inner=512, heads=2, kv_heads=2, head_size=128),
}


@dataclass(frozen=True)
class Schooling:
    """How long and on what both are trained; `length` is a text's in bytes."""

    target_steps: int = 240
    draft_steps: int = 60
    batch: int = 8
    length: int = 192
    peak_rate: float = 5e-3
    seed: int = 7


class Language:
    """Random walks over invented words, each with a favourite successor."""

    def __init__(self, seed: int, *, capitals: bool, words: int = 48) -> None:
        source = random.Random(seed)
        spelt: set[str] = set()
        while len(spelt) < words:
            syllables = source.randint(1, 3)
            spelt.add(
                "".join(
                    source.choice("bdfgklmnprstvz") + source.choice("aeiou")
                    for _ in range(syllables)
                )
            )
        self._words = sorted(word.upper() if capitals else word for word in spelt)
        source.shuffle(self._words)
        self._next = [source.sample(range(words), 4) for _ in range(words)]

    def text(self, source: random.Random, size: int) -> str:
        """Return a walk of exactly `size` bytes."""
        place = source.randrange(len(self._words))
        spelt = ""
        while len(spelt) < size:
            spelt += self._words[place] + " "
            place = source.choices(self._next[place], (80, 10, 6, 4))[0]
        return spelt[:size]


SMALL = Language(11, capitals=False)
CAPITALS = Language(12, capitals=True)


def prompts() -> dict[str, list[str]]:
    """Return beginnings of texts whose drafts are accepted (easy) or not (hard)."""
    return {
        name: [language.text(random.Random(n), PROMPT_BYTES) for n in range(PROMPTS)]
        for name, language in (("easy", SMALL), ("hard", CAPITALS))
    }


class Block(nn.Module):
    """A Llama layer with the parameters' Hugging Face names. EAGLE drafts skip its first norm."""

    def __init__(self, shape: Shape, *, first_norm: bool) -> None:
        super().__init__()
        self.shape = shape
        query = shape.heads * shape.head_size
        key = shape.kv_heads * shape.head_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            made = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(made.weight, std=inputs**-0.5 * 0.6)
            return made

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(shape.hidden, query),
                "k_proj": linear(shape.hidden, key),
                "v_proj": linear(shape.hidden, key),
                "o_proj": linear(query, shape.hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(shape.hidden, shape.inner),
                "up_proj": linear(shape.hidden, shape.inner),
                "down_proj": linear(shape.inner, shape.hidden),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, EPSILON)
        if first_norm:
            self.input_layernorm = nn.RMSNorm(shape.hidden, EPSILON)

    def forward(self, state: Tensor) -> Tensor:
        normed = self.input_layernorm(state) if hasattr(self, "input_layernorm") else state
        state = state + self.self_attn["o_proj"](self._attend(normed))
        normed = self.post_attention_layernorm(state)
        gated = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return state + self.mlp["down_proj"](gated)

    def _attend(self, state: Tensor) -> Tensor:
        batch, length, _ = state.shape
        size = self.shape.head_size

        def split(name: str) -> Tensor:
            return self.self_attn[name](state).view(batch, length, -1, size).transpose(1, 2)

        query, key, value = _turned(split("q_proj")), _turned(split("k_proj")), split("v_proj")
        shared = self.shape.heads // self.shape.kv_heads
        attended = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(shared, 1),
            value.repeat_interleave(shared, 1),
            is_causal=True,
        )
        return attended.transpose(1, 2).reshape(batch, length, -1)


def _turned(heads: Tensor) -> Tensor:
    """Apply Llama's rotary position embedding."""
    length, size = heads.shape[-2:]
    rates = ROPE_BASE ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * rates
    cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    low, high = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-high, low), -1) * sine


class Target(nn.Module):
    """The model that is served."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(Block(shape, first_norm=True) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, EPSILON)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.08)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the head reads, and what EAGLE hands to the draft."""
        state = self.embed_tokens(tokens)
        for layer in self.layers:
            state = layer(state)
        return self.norm(state)


class Draft(nn.Module):
    """An EAGLE head: from the next token and the last hidden state to the next hidden state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([Block(shape, first_norm=False)])

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.layers[0](self.fc(torch.cat((embedded, hidden), -1)))


def train_target(
    shape: Shape, schooling: Schooling, texts: Callable[[random.Random], str]
) -> Target:
    """Train next-byte prediction on `texts`."""
    target = Target(shape)

    def loss(tokens: Tensor) -> Tensor:
        logits = target.lm_head(target(tokens[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    data = _batches(texts, schooling, schooling.target_steps, schooling.seed)
    last = _fit(target, loss, data, schooling.target_steps, schooling.peak_rate)
    print(f"target: {schooling.target_steps} steps, loss {last:.3f}", flush=True)
    return target


def train_draft(
    target: Target, shape: Shape, schooling: Schooling, texts: Callable[[random.Random], str]
) -> Draft:
    """Distil a draft, unrolled as the server will run it, each step on the last one's output."""
    draft = Draft(shape)
    for parameter in target.parameters():
        parameter.requires_grad_(requires_grad=False)

    def loss(tokens: Tensor) -> Tensor:
        hidden = target(tokens)
        chosen = target.lm_head(hidden).argmax(-1)
        embedded = target.embed_tokens(tokens)
        state, total = hidden[:, :-1], torch.zeros(())
        for step in range(1, UNROLLED + 1):
            state = draft(embedded[:, step:], state[:, : tokens.shape[1] - step])
            logits = target.lm_head(state)
            total = total + functional.cross_entropy(
                logits.flatten(0, 1), chosen[:, step:].flatten()
            )
            total = total + 0.1 * functional.smooth_l1_loss(state, hidden[:, step:])
        return total

    data = _batches(texts, schooling, schooling.draft_steps, schooling.seed + 1)
    last = _fit(draft, loss, data, schooling.draft_steps, schooling.peak_rate)
    print(f"draft: {schooling.draft_steps} steps, loss {last:.3f} over {UNROLLED}", flush=True)
    return draft


def _batches(
    texts: Callable[[random.Random], str], schooling: Schooling, steps: int, seed: int
) -> Iterator[Tensor]:
    source = random.Random(seed)
    for _ in range(steps):
        rows = [texts(source).encode()[: schooling.length] for _ in range(schooling.batch)]
        yield torch.tensor([list(row) for row in rows])


def _fit(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    data: Iterator[Tensor],
    steps: int,
    peak_rate: float,
) -> float:
    optimiser = torch.optim.AdamW(module.parameters(), weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak_rate, total_steps=steps + 1)
    loss = torch.zeros(())
    for tokens in data:
        loss = loss_of(tokens)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        plan.step()
    return float(loss.detach())


def save_pair(folder: Path, shape: Shape, target: Target, draft: Draft) -> None:
    """Write both checkpoints."""
    state = {
        name if name.startswith("lm_head") else f"model.{name}": tensor
        for name, tensor in target.state_dict().items()
    }
    _save(folder / "target", shape, "LlamaForCausalLM", shape.layers, state)
    state = {"embed_tokens.weight": target.embed_tokens.weight, **draft.state_dict()}
    _save(folder / "draft", shape, "LlamaForCausalLMEagle", 1, state)


def _save(
    folder: Path, shape: Shape, architecture: str, layers: int, state: dict[str, Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_BASE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": CONTEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
            },
            indent=1,
        )
    )


def _byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are the bytes of the text."""
    # GPT-2's alphabet shows a byte as itself where that prints, else as a letter from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    letters |= {chr(256 + place): byte for place, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def make(folder: Path, shape: Shape, schooling: Schooling) -> None:
    """Train and write a pair."""
    torch.set_num_threads(1)  # small matrices: more threads wait for one another
    torch.manual_seed(schooling.seed)

    def both(source: random.Random) -> str:
        return source.choice((SMALL, CAPITALS)).text(source, schooling.length)

    def small(source: random.Random) -> str:
        return SMALL.text(source, schooling.length)

    target = train_target(shape, schooling, both)
    draft = train_draft(target, shape, schooling, small)
    save_pair(folder, shape, target, draft)
    (folder / "prompts.json").write_text(json.dumps(prompts(), indent=1))


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("folder", type=Path)
    cli.add_argument("--shape", choices=SHAPES, default="cpu")
    options = cli.parse_args()
    rate = 2e-3 if options.shape == "gpu" else Schooling.peak_rate
    make(options.folder, SHAPES[options.shape], Schooling(peak_rate=rate))


if __name__ == "__main__":
    main()
