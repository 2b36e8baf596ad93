"""What shared_prefix puts into a model, takes out again, and refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import prefix_train
from configs.errors import UserError
from prefix_train.families import FAMILIES, NotExact, find_parts
from prefix_train.layout import Layout
from prefix_train.patch import ATTENTION_NAME, Handle, install, shared_prefix
from tests import forests, models

TREE = ([3, 2, 1], [-1, 0, 0])


def snapshot(model: nn.Module) -> list[tuple[object, ...]]:
    """Everything that hangs on the model's modules and their configurations, as objects, and the tensors' bytes."""
    found: list[tuple[object, ...]] = []
    holders: list[object] = [
        *model.modules(),
        *{id(c): c for m in model.modules() if (c := vars(m).get("config"))}.values(),
    ]
    for holder in holders:
        for name, value in vars(holder).items():
            inner = list(value.items()) if isinstance(value, dict) else None
            found.append((holder, type(holder), name, id(value), repr(value) if inner is None else inner))
    found += [(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]
    return found


def arguments(**changes: Any) -> dict[str, Any]:
    layout = Layout.from_tree(*TREE)
    given = {
        "input_ids": torch.arange(6)[None],
        "position_ids": layout.position_ids(),
        "layout": layout,
        "use_cache": False,
    }
    return {name: value for name, value in {**given, **changes}.items() if value is not ...}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_leaving_restores_the_model_to_the_byte(family: str) -> None:
    model = models.build(family)
    model(input_ids=torch.arange(3)[None], use_cache=False)
    before = snapshot(model)
    with shared_prefix(model):
        assert snapshot(model) != before
        model(**arguments())
    assert snapshot(model) == before


def test_an_error_inside_restores_too() -> None:
    model = models.build("qwen3_5")
    before = snapshot(model)
    with pytest.raises(KeyError), shared_prefix(model):
        raise KeyError
    with shared_prefix(model), pytest.raises(NotExact):
        model(**arguments(layout=None))
    assert snapshot(model) == before


def test_a_failing_probe_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("qwen3_5")
    before = snapshot(model)

    def fail(self: Handle, layout: Layout) -> None:
        raise NotExact("planted")

    monkeypatch.setattr(Handle, "check_reached", fail)
    with pytest.raises(NotExact, match="planted"):
        install(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", models.FAMILIES)
def test_patches_by_count(family: str) -> None:
    model = models.build(family)
    handle = install(model)
    parts = handle.parts
    layers = model.get_decoder().config.num_hidden_layers
    deltas = 3 if layers == 4 else 0
    assert (len(parts.attention), len(parts.delta_nets)) == (layers - deltas, deltas)
    assert len(parts.entrances) == (2 if family in models.WITH_VISION else 1)
    masks = 1 if parts.family.one_input else 0
    assert len(handle.patches) == 2 + len(parts.entrances) + masks + 2 * len(parts.attention) + deltas
    assert all(patch.in_place for patch in handle.patches)
    handle.remove()
    assert not any(patch.in_place for patch in handle.patches)


def test_another_model_of_the_same_config_is_untouched() -> None:
    model = models.build("llama")
    other = LlamaForCausalLM(model.config)
    assert other.config is model.config
    before = other(input_ids=torch.arange(6)[None], use_cache=False).logits
    with shared_prefix(model):
        assert torch.equal(other(input_ids=torch.arange(6)[None], use_cache=False).logits, before)


def test_the_vision_tower_keeps_its_attention() -> None:
    model = models.build("qwen3_5")
    own = model.model.visual.config._attn_implementation
    with shared_prefix(model):
        assert model.model.language_model.config._attn_implementation == ATTENTION_NAME
        assert model.model.visual.blocks[0].attn.config._attn_implementation == own


def test_the_probe_leaves_random_state_and_gradients() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.build("qwen3_5_text"), LoraConfig(target_modules=["o_proj"], lora_dropout=0.5))
    state = torch.get_rng_state()
    install(model.train())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_of_a_patched_model_computes_with_its_own_weights() -> None:
    model = models.build("qwen3_5_text")
    with shared_prefix(model):
        other = copy.deepcopy(model)
        nn.init.zeros_(other.lm_head.weight)
        assert model(**arguments()).logits.abs().sum() > 0
        assert other(**arguments()).logits.abs().sum() == 0
        nn.init.zeros_(other.model.layers[0].linear_attn.out_proj.weight)
        handle = other.model.forward.args[0]
        assert handle.parts.decoder is other.model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": ...}, "^layout: the model is under shared_prefix"),
        ({"layout": "tree"}, "^layout: the model is under shared_prefix"),
        ({"layout": Layout.from_tree([3, 2], [-1, 0])}, "^layout: it has 5 tokens, the input 6"),
        ({"layout": Layout.from_tree(*TREE).to("meta")}, "^layout: it is on meta, the input on cpu"),
        ({"layout": Layout.from_tree(*TREE, width=3)}, r"linear_attn: the layout is made for a convolution of width 3"),
        ({"position_ids": ...}, "^position_ids: a pack needs"),
        ({"position_ids": torch.arange(6)}, r"^position_ids: their shape is \(6,\), not \(1, 6\) or \(3, 1, 6\)"),
        ({"position_ids": torch.zeros(4, 1, 6)}, "^position_ids: their shape"),
        ({"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, "^a batch of 2"),
        ({"input_ids": ...}, "^input_ids: the forward got neither"),
        ({"attention_mask": torch.ones(1, 6)}, "^attention_mask: a pack has no padding"),
        ({"use_cache": True}, "^use_cache"),
        ({"use_cache": ...}, "^use_cache"),
        ({"labels": torch.zeros(1, 6, dtype=torch.int64)}, "^labels: they would be shifted"),
        ({"output_attentions": True}, "^output_attentions"),
        ({"output_router_logits": True}, "^output_router_logits: a router's auxiliary loss"),
        ({"is_causal": False}, "^is_causal"),
        ({"past_key_values": ()}, "^past_key_values: a pack is computed in one piece"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "^cu_seq_lens_q: not an argument that is exact over a tree"),
    ],
)
def test_arguments_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    model = models.build("qwen3_5_text")
    with shared_prefix(model), pytest.raises(NotExact, match=message):
        model(**arguments(**changes))


@pytest.mark.parametrize("entrance", ["model", "model.model", "decoder"])
def test_every_way_in_is_guarded(entrance: str) -> None:
    model = models.build("qwen3_5")
    inside = {"model": model, "model.model": model.model, "decoder": model.model.language_model}[entrance]
    with shared_prefix(model):
        inside(**arguments())
        with pytest.raises(NotExact, match=r"^attention_mask: "):
            inside(**arguments(attention_mask=torch.ones(1, 6)))
        with pytest.raises(NotExact, match=r"^layout: "):
            inside(**arguments(layout=None))


def test_images_need_three_dimensional_positions() -> None:
    model = models.build("qwen3_5")
    pack = forests.build(model, *TREE, images=[0])
    pack.position_ids = pack.layout.position_ids()
    with shared_prefix(model), pytest.raises(NotExact, match=r"^position_ids: their shape"):
        forests.forward(model, pack)


def test_text_on_a_vision_model_takes_plain_positions() -> None:
    model = models.build("qwen3_5")
    given = arguments()
    with shared_prefix(model):
        plain = model(**given).logits
        wide = model(**{**given, "position_ids": given["position_ids"].expand(3, 1, -1)}).logits
    assert torch.equal(plain, wide)


@pytest.mark.parametrize("family", models.WITH_VISION)
def test_embeddings_instead_of_ids(family: str) -> None:
    model = models.build(family)
    given = arguments()
    embeddings = model.get_input_embeddings()(given["input_ids"])
    with shared_prefix(model):
        by_ids = model(**given).logits
        assert torch.equal(model(**{**given, "input_ids": None, "inputs_embeds": embeddings}).logits, by_ids)


class OtherMixer(nn.Module):
    """A token mixer that nobody knows."""


def changed(family: str, change: Callable[[Any], object]) -> PreTrainedModel:
    model = models.build(family)
    change(model)
    return model


def sliding() -> PreTrainedModel:
    config = Qwen3Config(
        **{**models._SHARED, "num_hidden_layers": 2}, use_sliding_window=True, sliding_window=8, max_window_layers=1
    )
    return Qwen3ForCausalLM(config)


def own_forward(module: nn.Module) -> None:
    module.forward = lambda hidden_states, **_: (hidden_states, None)  # type: ignore[method-assign]


INEXACT: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "sliding window": (sliding, r"^model\.layers\.1: sliding_attention is not exact over a tree"),
    "sliding window of one layer": (
        lambda: changed("qwen3", lambda m: setattr(m.model.layers[1].self_attn, "sliding_window", 128)),
        r"^model\.layers\.1\.self_attn: a sliding window \(128 tokens\)",
    ),
    "Mamba": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)),
        r"^MambaForCausalLM is of no family .* \(MambaBlock\) with norm \(MambaRMSNorm\), mixer \(MambaMixer\)",
    ),
    "Mamba among attention": (
        lambda: JambaForCausalLM(
            JambaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        ),
        r"^JambaForCausalLM is of no family .* mamba \(JambaMambaMixer\)",
    ),
    "an unknown family": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)),
        r"^GPT2LMHeadModel is of no family .* transformer\.h\.0 \(GPT2Block\)",
    ),
    "an unknown mixer in one layer": (
        lambda: changed("qwen3_5", lambda m: setattr(m.model.language_model.layers[2], "linear_attn", OtherMixer())),
        r"^model\.language_model\.layers\.2\.linear_attn: OtherMixer is not a token mixer that is understood",
    ),
    "a second mixer in one layer": (
        lambda: changed("llama", lambda m: setattr(m.model.layers[0], "more", m.model.layers[1].self_attn)),
        r"^model\.layers\.0 has 2 token mixers",
    ),
    "a pooling head": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**models._SHARED, num_hidden_layers=1)),
        r"LlamaForSequenceClassification\) is not a model that is understood",
    ),
    "dropout of attention": (
        lambda: changed("llama", lambda m: setattr(m.model.layers[1].self_attn, "attention_dropout", 0.1)),
        r"^model\.layers\.1\.self_attn: attention_dropout 0\.1",
    ),
    "another activation": (
        lambda: changed("qwen3_next", lambda m: setattr(m.model.layers[0].linear_attn, "activation", "gelu")),
        r"^model\.layers\.0\.linear_attn: the convolution's activation is gelu",
    ),
    "rotary frequencies by length": (
        lambda: changed("llama", lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic")),
        r"^model\.rotary_emb: dynamic frequencies",
    ),
    "a router's loss": (
        lambda: changed("qwen3_5_moe", lambda m: setattr(m.config.text_config, "output_router_logits", True)),
        r"^model\.language_model: config\.output_router_logits",
    ),
    "not causal": (
        lambda: changed("llama", lambda m: setattr(m.config, "is_causal", False)),
        r"^model: config\.is_causal is false",
    ),
    "a mixer somebody else patched": (
        lambda: changed("llama", lambda m: own_forward(m.model.layers[1].self_attn)),
        r"^model\.layers\.1\.self_attn: the forward of this LlamaAttention is not transformers' own any more",
    ),
}


@pytest.mark.parametrize("case", INEXACT)
def test_models_are_refused_by_name(case: str) -> None:
    build, message = INEXACT[case]
    model = build()
    before = snapshot(model)
    with pytest.raises(NotExact, match=message), shared_prefix(model):
        pytest.fail("entered")
    assert snapshot(model) == before


def test_a_subclass_with_its_own_forward_is_not_the_class_it_derives_from() -> None:
    model = models.build("llama")
    attention = model.model.layers[0].self_attn

    class Changed(type(attention)):
        def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            return hidden_states, None

    attention.__class__ = Changed
    with pytest.raises(NotExact, match=r"^model\.layers\.0\.self_attn: the forward of this Changed"):
        install(model)


def test_adapters_that_start_inside_an_example_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["o_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])
    with pytest.raises(NotExact, match="alora_invocation_tokens"):
        install(get_peft_model(models.build("llama"), config))


def test_twice_is_refused() -> None:
    model = models.build("llama")
    with shared_prefix(model), pytest.raises(NotExact, match="not transformers' own any more"):
        install(model)


def test_removing_below_another_patch_is_an_error() -> None:
    model = models.build("llama")
    handle = install(model)
    own = vars(model.model)["forward"]
    own_forward(model.model)
    with pytest.raises(RuntimeError, match=r"^LlamaModel\.forward was replaced after shared_prefix"):
        handle.remove()
    vars(model.model)["forward"] = own
    assert all(patch.in_place for patch in handle.patches)
    handle.remove()


def test_the_attention_chosen_by_name_alone_is_refused() -> None:
    model = models.build("llama")
    with shared_prefix(model):
        pass
    model.config._attn_implementation = ATTENTION_NAME
    with pytest.raises(NotExact, match="it works under shared_prefix"):
        model(input_ids=torch.arange(3)[None], use_cache=False)


@pytest.mark.parametrize("option", ["attention", "deltanet"])
def test_unknown_kernels_are_refused_at_start(option: str) -> None:
    with pytest.raises(UserError, match=f"^{option} kernels 'fast' are unknown"):
        install(models.build("qwen3_5_text"), **{option: "fast"})


@pytest.mark.parametrize(("option", "value"), [("attention", "flex"), ("deltanet", "fla")])
def test_kernels_of_another_device_are_refused_when_they_would_run(option: str, value: str) -> None:
    model = models.build("qwen3_5_text")
    with shared_prefix(model, **{option: value}), pytest.raises(UserError, match=f"^{option} kernels '{value}'"):
        model(**arguments())


def test_a_decoder_alone() -> None:
    model = models.build("llama").model
    with shared_prefix(model) as handle:
        assert list(handle.parts.attention) == ["layers.0.self_attn", "layers.1.self_attn"]
        assert model(**arguments()).last_hidden_state.shape == (1, 6, 32)


def test_registry_names_classes_that_transformers_has() -> None:
    for family in FAMILIES.values():
        modeling = __import__(family.modeling, fromlist=["*"])
        for name in (family.decoder, *family.layers, family.attention, *family.entrances, *family.tokenwise):
            assert hasattr(modeling, name), f"{family.modeling} has no {name}"
        assert family.delta_net is None or hasattr(modeling, family.delta_net.name)


def test_parts_are_found_through_peft() -> None:
    from peft import LoraConfig, get_peft_model

    parts = find_parts(get_peft_model(models.build("qwen3_5"), LoraConfig(target_modules=["o_proj"])))
    assert parts.decoder_name == "base_model.model.model.language_model"


def test_the_library_has_these_names() -> None:
    assert prefix_train.__all__ == [
        *("Layout", "collate_packs", "pack_examples", "pack_heldout", "shared_prefix", "train_packs")
    ]
    assert (prefix_train.Layout, prefix_train.shared_prefix) == (Layout, shared_prefix)
    with pytest.raises(AttributeError, match="no attribute 'patch_everything'"):
        _ = prefix_train.patch_everything
