"""Bytes of softmax, as torch's CUDA kernels take them (the CUDA build of torch on the null GPU: experiments/oracle)."""

import torch

from autofit.fakegpu import fake_gpu


def test_the_backward_of_softmax_holds_the_product_of_gradient_and_output_besides() -> None:
    with fake_gpu("a100-80gb"):
        scores = torch.empty(4, 1024, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        whole_bytes = 4 * scores.numel()  # of one float32 matrix
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32)
        gradient = torch.empty_like(shares)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        shares.backward(gradient)
        peak_bytes = torch.cuda.max_memory_allocated() - before
    assert peak_bytes == 2 * whole_bytes  # as the CUDA build says; 1.5 of them without the product
