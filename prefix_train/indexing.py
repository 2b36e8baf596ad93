"""The length index of a configuration, made by rendering every example: no model weights are loaded."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from configs.modelpath import from_pretrained_arguments, locate
from configs.schema import Config, ModelConfig
from prefix_train import lengths, tiny
from prefix_train.data import load_examples
from prefix_train.lengths import LengthIndex
from prefix_train.render import Renderer
from prefix_train.template import Targets
from prefix_train.tree import Trie


def renderer_of(model: ModelConfig, targets: Targets = "last") -> Renderer:
    """What renders examples for `model`: its processor or tokenizer, and its position index. targets: see Renderer."""
    if model.path is None:
        config = tiny.build_config(model.build)
        return Renderer(tiny.build_processor(config), config, targets=targets)
    path = locate(model.path)
    processor = tiny.load_processor(path)
    folder, more = from_pretrained_arguments(path)
    return Renderer(processor, AutoConfig.from_pretrained(folder, local_files_only=True, **more), targets=targets)


def make_index(config: Config, renderer: Renderer | None = None, trie: Trie | None = None) -> LengthIndex:
    """Render all training examples, write the index to its place, return it. Raises UserError for a bad example.

    renderer: `renderer_of` this configuration, where it is there already. trie: an empty one that is filled.
    """
    most = config.data.max_example_tokens or config.pack.max_positions
    renderer = renderer or renderer_of(config.model, config.data.targets)
    examples = load_examples(Path(config.data.train), renderer, most, config.data.on_bad_example)
    index = lengths.build(config, examples, examples.skipped, trie=trie)
    lengths.write(lengths.index_path(config), index)
    return index
