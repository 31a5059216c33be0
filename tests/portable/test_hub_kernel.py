"""The kernel for the hub: built from the package, loaded by the kernels library and by Transformers."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
)
from transformers.utils import is_kernels_available

import saobp
from saobp.portable.hub_function import layer_refinement, saobp_attention
from saobp.testing.tiny_models import WINDOW, tiny_batch, tiny_model
from saobp.transformers.attention_function import resolve_refinement

TOOL = Path(__file__).parents[2] / "tools" / "build_hub_kernel.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPOSITORY = "owner/saobp-attention"
IMPLEMENTATION = f"{REPOSITORY}:saobp_attention"
HAS_LIBRARY = is_kernels_available()
needs_library = pytest.mark.skipif(
    not HAS_LIBRARY, reason="Transformers finds no kernels library that fits it"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist") / "saobp-attention"
    command = [sys.executable, str(TOOL), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    return out


@pytest.fixture(scope="module")
def kernel(folder):
    """As the kernels library loads it; where that is not installed, as any package."""
    if HAS_LIBRARY:
        import kernels

        return kernels.get_local_kernel(folder)
    place = folder / "build" / f"torch-{DEVICE}"
    spec = importlib.util.spec_from_file_location(
        "hub_kernel", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    loaded = sys.modules["hub_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def in_transformers(folder, monkeypatch):
    """As if the folder were a repository of the hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={folder}")
    return {"attn_implementation": IMPLEMENTATION, "allow_all_kernels": True}


def test_the_layout_is_the_libraries(folder):
    """Variants of Python alone, relative imports, metadata, and an operator namespace of their own."""
    ids = set()
    for variant in ("torch-cuda", "torch-cpu"):
        place = folder / "build" / variant
        metadata = json.loads((place / "metadata.json").read_text())
        assert metadata["name"] == "saobp-attention"
        ids.add(metadata["id"])
        text = (place / "kernels" / "runtime" / "custom_op.py").read_text()
        assert f'NAMESPACE = "{metadata["id"]}"' in text
        for file in place.rglob("*.py"):
            assert not re.search(r"^\s*(from|import) saobp", file.read_text(), re.MULTILINE), file
    assert len(ids) == 2


@pytest.mark.parametrize("text", ["high:0.5", "low:0.3,steps=2", "elemmul"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_loaded_kernel_gives_what_the_package_gives(kernel, text, causal):
    query, key, value = (torch.randn(2, 4, 9, 8, device=DEVICE) for _ in range(3))
    mask = tiny_batch()["attention_mask"].to(DEVICE)
    expected = saobp.attention(query, key, value, text, attention_mask=mask, is_causal=causal)
    assert torch.equal(
        kernel.attention(query, key, value, text, attention_mask=mask, is_causal=causal), expected
    )


@pytest.mark.parametrize("factor", ["elemmul", "elemmul-prior", "none"])
def test_factors_without_a_strength_need_none(factor):
    module = tiny_model("bert")
    module.config.saobp = {"factor": factor}
    assert layer_refinement(module).factor == factor
    query = torch.zeros(1, 4, 3, 8)
    refinement, strength, _ = resolve_refinement(module, None, query, 3)
    assert refinement.factor == factor
    assert not strength.any()
    module.config.saobp = {"factor": "high"}
    for read in (lambda: layer_refinement(module), lambda: resolve_refinement(module, None, query, 3)):
        with pytest.raises(ValueError, match="strength 'auto'"):
            read()


def test_a_decoder_that_says_it_is_not_causal_is_refused():
    """Its causal mask is left out without padding, so rows would see later tokens."""
    shape = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = BigBirdPegasusForCausalLM(BigBirdPegasusConfig(vocab_size=64, **shape))
    model.config.saobp = {"factor": "high", "strength": 0.5}
    module, states = model.model.decoder.layers[0].self_attn, torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match=r"BigBirdPegasusDecoderAttention .* not causal"):
        saobp_attention(module, states, states, states, None)
    told, _ = saobp_attention(module, states, states, states, None, is_causal=True)
    expected = saobp.attention(states, states, states, "high:0.5", is_causal=True)
    torch.testing.assert_close(told, expected.transpose(1, 2))


def test_there_is_no_graph_break(kernel):
    query = torch.randn(1, 2, 9, 8, device=DEVICE, requires_grad=True)

    def step(query, strength):
        return kernel.attention(query, query, query, "high", strength=strength).sum()

    strength = torch.tensor([0.2, 0.4], device=DEVICE)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(query, strength), step(query, strength))


@needs_library
@pytest.mark.parametrize(
    ("family", "strength"), [("bert", 0.5), ("gpt2", 0.5), ("llama", [[0.1, 0.2, 0.3, 0.4], 0.7])]
)
def test_transformers_loads_it_by_name(in_transformers, family, strength, tmp_path, recwarn):
    model = saobp.apply(tiny_model(family), saobp.Refinement("high", strength))
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if model.can_generate() else AutoModelForMaskedLM
    loaded = auto.from_pretrained(tmp_path, **in_transformers).eval()
    assert loaded.config._attn_implementation == IMPLEMENTATION
    assert not [one for one in recwarn if "runs without it" in str(one.message)]
    batch = tiny_batch()
    with torch.no_grad():
        got, expected = loaded(**batch).logits, model(**batch).logits
    assert (got - expected)[batch["attention_mask"].bool()].abs().max() <= 1e-6 * expected.abs().max()


@needs_library
def test_what_a_function_alone_cannot_do_is_refused(in_transformers, tmp_path):
    ids = tiny_batch(padding=0)["input_ids"]
    saobp.apply(tiny_model("gpt2"), "high:0.5").save_pretrained(tmp_path / "fixed")
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "fixed", **in_transformers)
    with pytest.raises(ValueError, match="use_cache=False"):
        decoder.generate(ids, max_new_tokens=3, do_sample=False)
    assert decoder.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False).shape[1] == 12
    saobp.apply(tiny_model("bert"), "high:learned").save_pretrained(tmp_path / "learned")
    learned = AutoModelForMaskedLM.from_pretrained(tmp_path / "learned", **in_transformers)
    with pytest.raises(ValueError, match="needs values that the kernel alone does not have"):
        learned(ids)
    listed = saobp.Refinement("high", [0.1, 0.2])
    saobp.apply(tiny_model("distilbert"), listed).save_pretrained(tmp_path / "listed")
    with pytest.raises(ValueError, match="does not tell its layer"):
        AutoModelForMaskedLM.from_pretrained(tmp_path / "listed", **in_transformers)(ids)
    plain = tiny_model("bert")
    plain.set_attn_implementation(IMPLEMENTATION, allow_all_kernels=True)
    with pytest.raises(ValueError, match=r"config\.saobp does not say how to refine"):
        plain(ids)


@needs_library
def test_windows_are_taken_and_packed_texts_are_refused(in_transformers, tmp_path):
    """One text whose positions are told is taken."""
    refined = saobp.apply(tiny_model("mistral"), "high:0.5")
    refined.save_pretrained(tmp_path)
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path, **in_transformers)
    ids = tiny_batch(padding=0)["input_ids"]
    assert ids.shape[1] > WINDOW
    with torch.no_grad():
        found, expected = (one(ids, use_cache=False).logits for one in (decoder, refined.eval()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
    short = ids[:1, :WINDOW]
    decoder(short, position_ids=torch.arange(WINDOW)[None], use_cache=False)
    packed = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(ValueError, match="texts are packed"):
        decoder(short, position_ids=packed, use_cache=False)


INTERPRETED = """
import sys, torch
from importlib.metadata import packages_distributions
from pathlib import Path
import kernels
import saobp
kernel = kernels.get_local_kernel(Path(sys.argv[1]))
query = torch.randn(1, 2, 9, 16, requires_grad=True)
found = []
for attention in (kernel.attention, saobp.attention):
    output = attention(query, query, query, "high:0.5", backend="fused")
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    found.append((output.detach(), gradient))
for own, other in zip(*found):
    assert torch.equal(own, other)
names = {schema.name.partition("::")[0] for schema in torch._C._jit_get_all_schemas()}
namespaces = {name for name in names if "saobp" in name}
assert len(namespaces) == 2, namespaces
print("both")
"""


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_its_operators_are_other_ones_than_the_packages(kernel):
    modules = ("fused", "masked.launch", "elemmul.causal_operator")
    for package, module in itertools.product(("saobp", kernel.__name__), modules):
        importlib.import_module(f"{package}.kernels.{module}")
    own = importlib.import_module(f"{kernel.__name__}.kernels.runtime.custom_op").NAMESPACE
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    ours, packages = ({n.partition("::")[2] for n in names if n.startswith(f"{x}::")} for x in (own, "saobp"))
    assert ours == packages - {"decoding_step"}  # which is for models with a cache, if it was imported at all
    assert len(ours) > 5


@pytest.mark.slow
@needs_library
@needs_triton
def test_its_operators_and_the_packages_live_in_one_process(folder):
    """The Triton kernels of both, forward and backward, in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "both"
