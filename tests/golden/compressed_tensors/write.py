"""Writes the folders beside it by compressed-tensors' own code: a tiny model in each format.

    python3.12 -m venv venv && venv/bin/pip install compressed-tensors==0.20.0 torch transformers
    venv/bin/python tests/golden/compressed_tensors/write.py

The file beside a folder has the floats that its own code makes of codes of MX, in bfloat16.
"""

from pathlib import Path

import torch
from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = Path(__file__).parent
WIDTH, INNER, EXPERTS = 64, 96, 2


class Layer(torch.nn.Module):
    """The products of a layer with experts, two of them."""

    def __init__(self):
        super().__init__()
        shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64)}
        self.self_attn = torch.nn.ModuleDict(
            {name: torch.nn.Linear(k, n, bias=True) for name, (n, k) in shapes.items()}
        )
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        pairs = {
            "gate_proj": (WIDTH, INNER),
            "up_proj": (WIDTH, INNER),
            "down_proj": (INNER, WIDTH),
        }
        self.mlp.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({n: torch.nn.Linear(*s, bias=False) for n, s in pairs.items()})
            for _ in range(EXPERTS)
        )


def write(scheme: str) -> None:
    """A folder of a model in one of the library's schemes."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([Layer()])
    model = model.to(torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["re:.*mlp.gate$"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        args = module.quantization_scheme.weights
        blocks = module.weight.data.unflatten(-1, (-1, args.group_size))
        if hasattr(module, "weight_global_scale"):
            module.weight_global_scale.data.fill_(448 * 6 / module.weight.abs().max())
        scale, _ = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), args, getattr(module, "weight_global_scale", None)
        )
        module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = HERE / scheme.lower()
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    compressor.update_config(folder)
    if scheme.startswith("MX"):
        compressor.decompress_model(model)
        weights = {n: p for n, p in model.state_dict().items() if n.endswith("proj.weight")}
        save_file(
            {n: p.contiguous() for n, p in weights.items()}, HERE / f"{folder.name}.safetensors"
        )


for name in ("MXFP4A16", "MXFP8A16", "NVFP4A16"):
    write(name)
