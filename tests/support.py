"""What is supported, found out by trying it: the tables of docs/guides/support.md.

`python -m tests.support` writes them anew.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log10
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prefix_train import generate
from prefix_train.families import NotExact
from prefix_train.patch import install
from prefix_train.render import Example
from tests import batches, forests, ggufs, models, oracle, streaming

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "support.md"

TREE = ([5, 65, 3, 1, 4, 2, 66], [-1, 0, 1, 1, 0, 4, -1])
"""Two roots, three levels, segments around a chunk's length and around the convolution's width."""

TITLES = {
    "llama": "Llama, SmolLM2",
    "mistral": "Mistral, without a sliding window",
    "mixtral": "Mixtral, without a sliding window",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo-2",
    "olmo3": "OLMo-3, with full attention in every layer",
    "olmo_hybrid": "OLMo-Hybrid",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, Qwen3.6, the language model alone",
    "qwen3_5": "Qwen3.5, Qwen3.6",
    "qwen3_5_moe_text": "Qwen3.5-MoE, Qwen3.6-MoE, the language model alone",
    "qwen3_5_moe": "Qwen3.5-MoE, Qwen3.6-MoE",
}

COLUMNS = ("Family", "`model_type`", "Images", "Resident", "Streaming", "Generating", "GGUF", "Gradients differ by")


@dataclass(frozen=True)
class Row:
    """One family. error: worst relative difference of a gradient tensor, in float64, to examples alone; None: no."""

    family: str
    model_type: str
    images: bool
    streaming: bool
    generating: bool
    error: float

    def cells(self) -> list[str]:
        """As the page says it; the error as a power of ten, at least ten times as large: processors round otherwise."""
        bound = f"< 1e{ceil(log10(self.error)) + 1}"
        yes = ["yes" if each else "no" for each in (self.images, True, self.streaming, self.generating)]
        gguf = ggufs.ARCHITECTURES.get(self.family)
        return [
            *(TITLES[self.family], f"`{self.model_type}`", *yes, f"`{gguf}`" if gguf else "no", bound),
        ]


def row(family: str, folder: Path) -> Row:
    """Try everything with a tiny model of a family; AssertionError where a pack is not its examples alone."""
    made = models.build(family)
    return Row(
        family,
        made.config.model_type,
        family in models.WITH_VISION,
        streams(family, folder),
        generates(made),
        gradient_error(family),
    )


def gradient_error(family: str) -> float:
    """A pack against its examples alone through transformers' unmodified model: loss, hidden states, every gradient."""
    model = models.build(family, torch.float64)
    pack = forests.build(model, *TREE, images=(0, 2) if family in models.WITH_VISION else ())
    with oracle.float64():
        alone = oracle.run(model, pack.examples, models.IMAGE)
        packed = forests.run(model, pack)
    forests.assert_same(packed, alone, hidden=1e-10, gradient=1e-10)
    whole = torch.stack([each.norm() for each in alone.gradients.values()]).norm()
    assert alone.gradients.keys() == {name for name, _ in model.named_parameters()}, "a parameter without a gradient"
    return max(
        float((packed.gradients[name] - each).norm() / max(each.norm(), 1e-6 * whole))
        for name, each in alone.gradients.items()
    )


def streams(family: str, folder: Path) -> bool:
    """Is an update with weights that pass through equal, to the bit, to one where they stay?"""
    made = streaming.built(family, torch.bfloat16)
    images = family in models.WITH_VISION
    store = streaming.stored(made, folder / family, "nf4")
    config = streaming.options(torch.bfloat16, adapter={"targets": ["q_proj", "o_proj"]})
    both = streaming.pair(made, store, config, images=images)
    given = batches.batches(batches.make(made, 5, images=images), [[0, 1, 2], [3, 4]])
    mine, theirs = streaming.updated(both, given)
    return mine == theirs and not streaming.unlike(streaming.gradient(both.stream), streaming.gradient(both.whole))


def generates(model: PreTrainedModel, new: int = 5) -> bool:
    """Are answers with the prefix computed once those of transformers' own `generate`, token for token?"""
    model.eval()
    examples = batches.make(model, 4, images=hasattr(model.model, "get_rope_index"))
    wanted = [plain(model, example, new) for example in examples]
    assert len({tuple(answer) for answer in wanted}) > 1
    answers, counts = generate.greedy(model, examples, new, [], min_shared=4)
    assert counts.prompt < counts.logical, "a prefix that is computed once"
    return answers == wanted


def plain(model: PreTrainedModel, example: Example, new: int, end: Sequence[int] = ()) -> list[int]:
    """The answer to one prompt, of at most `new` tokens, by transformers alone."""
    length = example.prompt_length
    given: dict[str, Any] = {"input_ids": torch.from_numpy(example.ids[:length].copy())[None]}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if example.images:
        given["pixel_values"] = torch.from_numpy(np.concatenate([image.load() for image in example.images]))
        given["image_grid_thw"] = torch.tensor([image.grid for image in example.images])
        given["mm_token_type_ids"] = torch.from_numpy((example.keys[:length] < 0).astype(np.int64))[None]
    answer = model.generate(**given, do_sample=False, max_new_tokens=new, eos_token_id=list(end), pad_token_id=0)
    return answer[0, length:].tolist()  # type: ignore[no-any-return]


SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def tiny(model_type: str, **values: Any) -> PreTrainedModel:
    """A model of a few parameters."""
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **values}))
    return made


def dense(model_type: str, **values: Any) -> PreTrainedModel:
    """One with attention and a feed-forward."""
    return tiny(model_type, **{**HEADS, "intermediate_size": 8, "pad_token_id": None, **values})


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "Mistral with a sliding window": lambda: dense("mistral", sliding_window=4096),
    "Mixtral with a sliding window": lambda: dense("mixtral", sliding_window=4096, num_local_experts=2),
    "Qwen2 with a sliding window in its upper layers": lambda: dense(
        "qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=1
    ),
    "OLMo-3 as it was published": lambda: dense("olmo3"),
    "Gemma-2": lambda: dense("gemma2", head_dim=4),
    "Gemma-3": lambda: dense("gemma3_text", head_dim=4),
    "Granite": lambda: dense("granite"),
    "Phi-3": lambda: dense("phi3"),
    "GPT-2": lambda: tiny("gpt2", n_head=2),
    "gpt-oss": lambda: dense("gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=4),
    "LFM2": lambda: dense("lfm2"),
    "Mamba": lambda: tiny("mamba"),
    "Mamba-2": lambda: tiny("mamba2", num_heads=2, head_dim=8, n_groups=1),
    "Jamba, Mamba among attention": lambda: dense("jamba", num_experts=2, attn_layer_offset=1, attn_layer_period=2),
    "a frequency of rotary embeddings that follows the longest sequence": lambda: dense(
        "llama",
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "dropout in attention": lambda: dense("llama", attention_dropout=0.1),
    "noise in a router": lambda: dense("mixtral", num_local_experts=2, router_jitter_noise=0.1),
    "a router's auxiliary loss": lambda: dense("mixtral", num_local_experts=2, output_router_logits=True),
}
"""Models that would not be exact over a tree, or that nobody has looked at."""


def refusal(name: str) -> str:
    """What is said about one of `REFUSED`. Some go on with the first layer's classes and what is known: left out."""
    with pytest.raises(NotExact) as found:
        install(REFUSED[name]())
    return str(found.value).partition("; its first layer is ")[0]


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def supported(text: str) -> list[list[str]]:
    """The cells of the page's first table."""
    return _cells(text, "families")


def refused(text: str) -> dict[str, str]:
    """Messages by name in the page's second table."""
    return {name: message.strip("`") for name, message in _cells(text, "refused")}


def _cells(text: str, name: str) -> list[list[str]]:
    lines = _between(text, name).strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _between(text: str, name: str) -> str:
    found = re.search(f"<!-- {name} -->\n(.*)<!-- end of {name} -->", text, re.DOTALL)
    assert found, f"{PAGE.name} has no table {name}"
    return found.group(1)


def written(text: str, name: str, what: str) -> str:
    """`text` with `what` for a table's present contents."""
    old = _between(text, name)
    return text.replace(f"<!-- {name} -->\n{old}", f"<!-- {name} -->\n{what}")


def main() -> None:
    """Write both tables into the page."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(family, Path(folder)).cells() for family in models.FAMILIES]
    text = written(PAGE.read_text(encoding="utf-8"), "families", table(COLUMNS, rows))
    messages = [[name, f"`{refusal(name)}`"] for name in REFUSED]
    PAGE.write_text(written(text, "refused", table(("Model", "Message"), messages)), encoding="utf-8")


if __name__ == "__main__":
    main()
