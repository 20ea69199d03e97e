"""Writes the folders beside it by ModelOpt's and Quark's own code, a tiny Llama in MX each.

    python3.11 -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.24.0 nvidia-modelopt==0.47.0 amd-quark==0.13
    venv/bin/python tests/golden/exported/write.py modelopt
    venv/bin/python tests/golden/exported/write.py quark

The file beside a folder has the floats that the library's own code makes of the codes, in bfloat16.
"""

import sys
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


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))
with torch.no_grad():
    {"modelopt": by_modelopt, "quark": by_quark}[sys.argv[1]](
        model.to(torch.bfloat16).eval(), torch.arange(16)[None]
    )
