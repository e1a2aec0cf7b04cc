"""The operations between the matrix products in torch: the reference for the compiled kernels, and the fallback."""

from __future__ import annotations

import torch
from torch.nn import functional

from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.torch.packed.buffers import Matrix
from embedctl_workers.backends.torch.packed.inputs import Tables, Texts
from embedctl_workers.backends.torch.packed.weights import Part


class TorchKernels:
    """As :class:`.kernels.CompiledKernels`; takes arrays or tensors."""

    name = "torch kernels"
    code = ()

    def embed(self, ids: Rows, positions: Rows, tables: Tables, x: Matrix) -> None:
        words, places = torch.as_tensor(tables.words), torch.as_tensor(tables.places)
        torch.as_tensor(x).copy_(_norm(words[ids] + places[positions], tables.norm))

    def attention(self, qkv: Matrix, texts: Texts, context: Matrix) -> None:
        of_all, into = torch.as_tensor(qkv), torch.as_tensor(context)
        for text in texts.order:
            begin, end = texts.offsets[text : text + 2].tolist()
            q, k, v = of_all[:, begin:end].view(3, -1, end - begin, of_all.shape[2])
            if texts.attended is not None:
                k, v = k[:, : texts.attended[text]], v[:, : texts.attended[text]]
            one = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
            into[begin:end] = one.transpose(0, 1).flatten(1)

    def add_layer_norm(self, x: Matrix, y: Matrix, norm: Part) -> None:
        into = torch.as_tensor(x)
        into.copy_(_norm(into.add_(torch.as_tensor(y)), norm))

    def gelu(self, x: Matrix) -> None:
        into = torch.as_tensor(x)
        into.copy_(functional.gelu(into))


def _norm(x: torch.Tensor, norm: Part) -> torch.Tensor:
    weight, bias = torch.as_tensor(norm.weight), torch.as_tensor(norm.bias)
    return functional.layer_norm(x, weight.shape, weight, bias, norm.eps)
