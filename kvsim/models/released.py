"""In which format the weights of a published checkpoint are, by its configuration."""

from collections.abc import Mapping


def released_format(stated: object) -> str:
    """The format of weights that a ``quantization_config`` describes, or nothing if not known.

    The names are those of ``--weights``; a configuration without one describes fp16.
    """
    if stated is None:
        return "fp16"
    if not isinstance(stated, Mapping):
        return ""
    method, bits = stated.get("quant_method"), stated.get("bits")
    if method == "fp8":
        return "fp8-block" if stated.get("weight_block_size") else "fp8"
    if method in ("gptq", "awq"):
        return "int4" if bits == 4 else "int8" if bits == 8 else ""
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(stated.get("quant_algo")), "")
    return "mxfp4" if method == "mxfp4" else ""
