"""Writes the folders beside it by the own code of libraries, a tiny model in MX each.

    python3.11 -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.24.0 nvidia-modelopt==0.47.0 amd-quark==0.13
    venv/bin/python tests/golden/exported/write.py modelopt
    venv/bin/python tests/golden/exported/write.py quark

    python3.12 -m venv venv
    venv/bin/pip install torch==2.15.0 transformers==5.24.0 accelerate
    venv/bin/pip install --no-deps gpt-oss==0.0.9
    venv/bin/python tests/golden/exported/write.py deepseek
    venv/bin/python tests/golden/exported/write.py mxfp8
    venv/bin/python tests/golden/exported/write.py gpt_oss

The file beside a folder has the floats that the library's own code makes of the codes, in bfloat16.
Nobody's code on PyPI writes gpt-oss' layout without a GPU: its codes are random, and its readers
are transformers' and OpenAI's own.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def by_modelopt(model, tokens):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    folder = HERE / "modelopt"
    model = mtq.quantize(model, mtq.MXFP8_DEFAULT_CFG, lambda model: model(tokens))
    export_hf_checkpoint(model, export_dir=folder)
    written, floats = load_file(folder / "model.safetensors"), {}
    for name in [name for name in written if name + "_scale" in written]:
        codes = MXFP8QTensor(written[name].shape, torch.bfloat16, written[name])
        floats[name] = codes.dequantize(scale=written[name + "_scale"])
    save_file(floats, HERE / "modelopt.safetensors")


def by_quark(model, tokens):
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config.config import OCP_MXFP4Spec, QConfig, QLayerConfig

    folder = HERE / "quark"
    weight = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    config = QConfig(global_quant_config=QLayerConfig(weight=weight), exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, [tokens]))
    floats = {}
    for name, layer in model.named_modules():
        if getattr(layer, "weight_quantizer", None) is not None:
            floats[name + ".weight"] = layer.weight_quantizer(layer.weight).contiguous()
    with torch.no_grad():
        export_safetensors(model, output_dir=str(folder))
    save_file(floats, HERE / "quark.safetensors")


def by_transformers(name, model, tile):
    """DeepSeek's own quantizer, as transformers has it, with powers of two as scales."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # It wants a GPU, on which the model then runs; it quantizes anywhere.
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, **_: None
    with tempfile.TemporaryDirectory() as floats:
        model.save_pretrained(floats)
        quantization = FineGrainedFP8Config(weight_block_size=tile, scale_fmt="ue8m0")
        model = AutoModelForCausalLM.from_pretrained(floats, quantization_config=quantization)
    model.save_pretrained(HERE / name)
    written = load_file(HERE / name / "model.safetensors")
    floats = {
        weight: Fp8Dequantize(None)._dequantize_one(codes, written[weight + "_scale_inv"])
        for weight, codes in written.items()
        if weight.endswith(("up_proj.weight", "kv_a_proj_with_mqa.weight"))  # files stay small
    }
    save_file(floats, HERE / f"{name}.safetensors")


def deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 1}
    sizes |= {"q_lora_rank": None, "kv_lora_rank": 128, "qk_rope_head_dim": 128}
    sizes |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, first_k_dense_replace=1))


def gpt_oss():
    from gpt_oss.torch.weights import Checkpoint
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, floats = HERE / "gpt_oss", {}
    (folder / "original").mkdir(parents=True, exist_ok=True)
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    blocks = torch.randint(0, 256, (2, 48, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 48, 3), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, folder / "model.safetensors")
    floats[name] = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).contiguous()
    name = "block.0.mlp.mlp1_weight"
    file = folder / "original/model.safetensors"
    save_file({f"{name}.blocks": blocks, f"{name}.scales": scales}, file)
    floats[name] = Checkpoint(folder / "original", torch.device("cpu")).get(name)
    save_file(floats, HERE / "gpt_oss.safetensors")


torch.manual_seed(0)
with torch.no_grad():
    if sys.argv[1] == "gpt_oss":
        gpt_oss()
    elif sys.argv[1] == "deepseek":
        by_transformers("deepseek", deepseek().to(torch.bfloat16), (128, 128))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))
        model, tokens = model.to(torch.bfloat16).eval(), torch.arange(16)[None]
        {"modelopt": by_modelopt, "quark": by_quark}.get(
            sys.argv[1], lambda model, _: by_transformers("mxfp8", model, (1, 32))
        )(model, tokens)
