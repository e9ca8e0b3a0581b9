"""Converts matrices to 8 bits with the kernels of a GPU, and with PyTorch's operators: the same bits, also of a Linear layer's products.

On a fake driver with tensors of the processor; its stream runs when somebody waits for it."""

import ctypes
import os

import torch
from torch import nn

from offloadd import _fp8, _offloadd

BF16 = torch.bfloat16
driver = ctypes.CDLL(os.environ["KERNELS_FAKE"])
converter, used = _offloadd.Fp8Converter(0), []


class Waiting:
    """Waits for the kernels, as PyTorch's operators on a GPU's stream do."""

    align, scratch_elems = converter.align, converter.scratch_elems

    def convert(self, x, *args):
        assert x % self.align() == 0
        used.append(x)
        converter.convert(x, *args)
        assert driver.cuStreamSynchronize(ctypes.c_size_t(0)) == 0


def same(a, b):
    return a is b is None or torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


_fp8._stream_of = lambda x: 0
on_gpu = lambda x, dtype, straight, transposed: _fp8._converted_on_gpu(Waiting(), x, dtype, straight, transposed)

torch.manual_seed(0)
for rows, columns in ((16, 16), (144, 272), (48, 640)):
    for size in (1.0, 1.75, 3e-5, 1e37):
        x = (torch.randn(rows, columns) * size).to(BF16)
        # Contiguous, at an address that no access of several numbers takes.
        odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, columns)
        for dtype in (_fp8._WEIGHTS, _fp8._GRADIENTS):
            for straight, transposed in ((True, False), (False, True), (True, True)):
                expected = _fp8._converted(x, dtype, straight, transposed)
                for one in (x, odd):
                    found = on_gpu(one, dtype, straight, transposed)
                    assert all(map(same, found, expected)), (rows, columns, size, dtype, straight, transposed)
                    assert [y is None for y in found] == [not straight, not transposed, False]
x[3, 5] = float("inf")
assert on_gpu(x, _fp8._WEIGHTS, True, False).inverse_scale.isnan()


def products(layer, x, grad):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = _fp8._forward(layer, x)
    out.backward(grad)
    return [out.detach(), x.grad, *(param.grad for param in layer.parameters())]


for bias in (True, False):
    layer = nn.Linear(64, 48, bias=bias, dtype=BF16)
    x, grad = torch.randn(3, 7, 64).to(BF16), torch.randn(3, 7, 48).to(BF16) * 1e-4
    expected, before = products(layer, x, grad), len(used)
    _fp8._converter_for = lambda x: Waiting()
    found = products(layer, x, grad)
    assert len(used) == before + 5, "input and weight, then gradients once for both products"
    _fp8._converter_for = lambda x: None
    assert all(map(torch.equal, found, expected))
print("same bits")
