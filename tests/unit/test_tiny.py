"""The tiny tokenizer, processor and model, and processors of real model folders."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5ForConditionalGeneration, Qwen3ForCausalLM

from configs.errors import UserError
from prefix_train import tiny
from tests.tiny_vision import BUILD

TEXT_BUILD = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PICTURE = Image.fromarray(np.arange(32 * 48, dtype=np.uint8).reshape(32, 48))
CHAT = [
    {"role": "system", "content": "Read."},
    {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": "This."},
]


def render(processor, chat, **options):
    return processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt", **options)


def with_key(build, path, value):
    """`build` with one more key, addressed by dots."""
    copy = json.loads(json.dumps(build))
    *holders, key = path.split(".")
    place = copy
    for holder in holders:
        place = place[holder]
    place[key] = value
    return copy


@pytest.fixture(scope="module")
def processor():
    return tiny.build_processor()


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "  spaces  \n\n\t",
        "čšž ﬁ 漢字 🙂 e\u0301"[:-2],
        '{"digit": 7, "parity": "odd"}',
        "\x00\x7f",
        "a<|im_end|>b",
    ],
)
def test_any_text_comes_back(text):
    tokenizer = tiny.build_tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_vocabulary_is_bytes_merges_and_special_tokens():
    tokenizer = tiny.build_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 1024
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)) == list(range(1010, 1024))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert [len(tokenizer(token).input_ids) for token in tiny.SPECIAL_TOKENS] == [1] * 14


def test_chat_template_writes_qwens_frame(processor):
    text = processor.apply_chat_template(CHAT[:2], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nRead.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert processor.apply_chat_template(CHAT) == text + "This.<|im_end|>\n"


@pytest.mark.parametrize(
    ("chat", "complaint"),
    [
        (
            [{"role": "system", "content": [{"type": "image", "image": PICTURE}]}],
            "System message cannot contain images",
        ),
        ([CHAT[1], CHAT[0]], "must be at the beginning"),
        ([{"role": "tool", "content": "x"}], "Unexpected message role"),
        ([{"role": "user", "content": 5}], "Unexpected content type"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "Unexpected item type"),
    ],
)
def test_chat_template_refuses(processor, chat, complaint):
    with pytest.raises(Exception, match=complaint):
        processor.tokenizer.apply_chat_template(chat)


def test_processor_gives_ids_types_pixels_and_grid(processor):
    out = render(processor, CHAT)
    ids, types = out["input_ids"][0], out["mm_token_type_ids"][0]
    assert out["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert out["pixel_values"].shape == (24, 3 * 2 * 8 * 8)
    assert (ids == processor.image_token_id).sum() == 6
    assert torch.equal(types == 1, ids == processor.image_token_id)
    # patch (0, 0), first channel, first frame, against the picture itself
    expected = torch.from_numpy(np.asarray(PICTURE)[:8, :8] / 255.0 * 2 - 1)
    torch.testing.assert_close(out["pixel_values"][0, :64].view(8, 8), expected.float(), atol=1e-6, rtol=0)


def test_saved_processor_comes_back(tmp_path):
    model = tiny.build_model(BUILD, seed=0)
    saved = tiny.build_processor(model.config)
    saved.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = tiny.load_processor(tmp_path)
    assert json.loads((tmp_path / "processor_config.json").read_text())["processor_class"] == "Qwen3VLProcessor"
    before, after = render(saved, CHAT), render(loaded, CHAT)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_folder_with_a_released_models_files_loads_without_torchvision(tmp_path):
    """The files as Qwen3.5's releases have them: a Fast image processor, a video processor, a template file."""
    tiny.build_model(BUILD, seed=0).config.save_pretrained(tmp_path)
    tiny.build_tokenizer().save_pretrained(tmp_path)
    images = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 8, "temporal_patch_size": 2}
    images |= {"merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (tmp_path / name).write_text(json.dumps(images | kind))
    out = render(tiny.load_processor(tmp_path), CHAT)
    assert out["image_grid_thw"].prod() * 64 >= 65536
    assert out["pixel_values"].shape[0] == out["image_grid_thw"].prod()


def test_text_models_have_a_tokenizer_for_a_processor(tmp_path):
    model = tiny.build_model(TEXT_BUILD, seed=0)
    built = tiny.build_processor(model.config)
    assert isinstance(built, PreTrainedTokenizerBase)
    model.save_pretrained(tmp_path)
    built.save_pretrained(tmp_path)
    loaded = tiny.load_processor(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerBase)
    chat = [{"role": "user", "content": "Hello"}]
    assert loaded.apply_chat_template(chat)["input_ids"] == built.apply_chat_template(chat)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)("x").input_ids == loaded("x").input_ids


@pytest.mark.parametrize(
    ("config", "complaint"),
    [(None, "no config.json"), ({"model_type": "qwen2_5_vl"}, "Qwen2_5_VLProcessor"), ("{", "config.json")],
)
def test_load_processor_names_what_it_cannot_use(tmp_path, config, complaint):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(UserError, match=complaint):
        tiny.load_processor(tmp_path)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [("tokenizer.json", "the tokenizer has no vocabulary"), ("processor_config.json", "AutoImageProcessor")],
)
def test_load_processor_names_what_a_folder_lacks(tmp_path, missing, complaint):
    model = tiny.build_model(BUILD, seed=0)
    model.config.save_pretrained(tmp_path)
    tiny.build_processor(model.config).save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=f"{tmp_path}: {complaint}"):
        tiny.load_processor(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer.json", "{", "AutoTokenizer finds nothing that it can load: "),
        ("tokenizer.json", "{}", "AutoTokenizer finds nothing that it can load: KeyError: 'added_tokens'"),
        ("tokenizer_config.json", "[]", "AutoTokenizer finds nothing that it can load: AttributeError: "),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "x"}', "AutoConfig finds nothing .*hidden_size"),
        ("config.json", '{"model_type": "qwen9"}', "AutoConfig finds nothing that it can load: .*qwen9"),
    ],
)
def test_a_file_that_transformers_cannot_use_is_an_error_that_names_the_folder(tmp_path, file, content, complaint):
    model = tiny.build_model(TEXT_BUILD, seed=0)
    model.config.save_pretrained(tmp_path)
    tiny.build_processor(model.config).save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=f"(?s){tmp_path}: {complaint}"):
        tiny.load_processor(tmp_path)


def test_what_is_no_model_folder_says_what_was_meant(tmp_path):
    for name in ("model.GGUF", "config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UserError, match=r"or a GGUF file, whose name ends in \.gguf"):
            tiny.load_processor(tmp_path / name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "q4.gguf").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/folder: no config.json, .*; it holds q4.gguf: name that file"):
        tiny.load_processor(tmp_path / "folder")


def test_code_that_a_folder_brings_along_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the code"))
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=f"(?s){tmp_path}: AutoConfig finds nothing that it can load: .*custom code"):
        tiny.load_processor(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_model_is_transformers_own_with_the_tokenizers_ids():
    model = tiny.build_model(BUILD, seed=0)
    assert type(model) is Qwen3_5ForConditionalGeneration
    assert model.config.text_config.vocab_size == 1024
    assert model.config.image_token_id == tiny.build_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert model.generation_config.eos_token_id == tiny.build_tokenizer().eos_token_id
    assert model(**render(tiny.build_processor(model.config), CHAT)).logits.isfinite().all()
    assert type(tiny.build_model(TEXT_BUILD, seed=0)) is Qwen3ForCausalLM


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = tiny.build_model(BUILD, seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = tiny.build_model(BUILD, seed=3).state_dict(), tiny.build_model(BUILD, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    rounded = tiny.build_model(BUILD, seed=3, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(first[name].bfloat16(), rounded[name]) for name in first)


def test_gated_deltanet_starts_with_a_memory():
    """Steps softplus(dt_bias) as the architecture's authors draw them; transformers' own would all be 1.3."""
    build = with_key(BUILD, "text_config.linear_num_value_heads", 64)
    steps = torch.nn.functional.softplus(
        tiny.build_model(build, seed=0).model.language_model.layers[0].linear_attn.dt_bias
    )
    assert 0.001 <= steps.min() < 0.003
    assert 0.03 < steps.max() <= 0.1
    assert 0.005 < steps.median() < 0.02


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("model_type", "qwen35", "no model type 'qwen35'; did you mean qwen3_5"),
        ("model_type", None, "no model type None"),
        ("tie_embeddings", True, r"model\.build\.tie_embeddings: no such key; did you mean tie_word_embeddings"),
        (
            "text_config.hidden_sizes",
            8,
            r"model\.build\.text_config\.hidden_sizes: no such key; did you mean hidden_size",
        ),
        ("vision_config.patch", 8, r"model\.build\.vision_config\.patch: no such key"),
        ("text_config.rope_parameters.mrope_sections", [1], "did you mean mrope_section"),
        ("text_config.hidden_size", "wide", "hidden_size.*expected int"),
        ("text_config.layer_types", ["full_attention"], "num_hidden_layers"),
        ("text_config.vocab_size", "many", "vocab_size.*expected int"),
        ("text_config.vocab_size", 100, "vocab_size 100 is below the tokenizer's 1024"),
        (
            "text_config.eos_token_id",
            5,
            "eos_token_id is 5, but the tokenizer's <|im_end|> is 1012".replace("|", r"\|"),
        ),
        ("image_token_id", 7, "image_token_id is 7"),
        ("text_config", "none", "text_config"),
    ],
)
def test_a_mistake_in_build_is_named(path, value, complaint):
    with pytest.raises(UserError, match=complaint):
        tiny.build_model(with_key(BUILD, path, value), seed=0)


def test_build_is_left_as_it_was():
    build = json.loads(json.dumps(BUILD))
    tiny.build_model(build, seed=0)
    assert build == BUILD
