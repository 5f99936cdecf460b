"""Small programs whose operators the traced steps lack: losses, norms, optimizers, experts, vision and audio towers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
_CARD: dict[str, Any] = {"device": "cuda"}
Program = Callable[[], Any]


def programs() -> Iterator[Program]:
    """Each is run once, with gradients."""
    yield from (_trained(optimizer) for optimizer in _OPTIMIZERS)
    yield from (_backward(layer, shape) for layer, shape in _LAYERS)
    yield from (_of_two(loss) for loss in _LOSSES)
    yield from (_of_one(function) for function in _FUNCTIONS)
    yield from (_attention(**how) for how in _ATTENTION)
    yield from (_experts, _index_backward, _masks, _random_numbers, _rollout, _audio, _packed, _scaled_down)


# -- optimizers --------------------------------------------------------------------------------------------------------

_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True), lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.Adam(p, fused=True), lambda p: torch.optim.Adam(p, foreach=True, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True, nesterov=True), lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.Adagrad(p, fused=True), lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    lambda p: torch.optim.Adadelta(p), lambda p: torch.optim.Adamax(p), lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RAdam(p), lambda p: torch.optim.ASGD(p), lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.Adafactor(p), lambda p: torch.optim.Muon(p),
)  # fmt: skip


def _trained(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Program:
    def run() -> None:
        model = nn.Sequential(nn.Linear(640, 384, bias=False), nn.Linear(384, 256, bias=False)).cuda()
        made = optimizer(model.parameters())
        for _ in range(2):
            model(torch.zeros(32, 640, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            made.step()
            made.zero_grad()

    return run


# -- layers ------------------------------------------------------------------------------------------------------------

_LAYERS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.LayerNorm(768), (8, 512, 768)), (lambda: nn.RMSNorm(768), (8, 512, 768)),
    (lambda: nn.LayerNorm(128), (70000, 128)), (lambda: nn.RMSNorm(128), (70000, 128)),
    (lambda: nn.GroupNorm(8, 256), (4, 256, 576)), (lambda: nn.BatchNorm1d(256), (64, 256)),
    (lambda: nn.Conv1d(256, 256, 4, groups=256, padding=3), (2, 256, 700)),
    (lambda: nn.Conv2d(128, 128, 3, groups=128, padding=1), (4, 128, 40, 40)), (nn.GELU, (8, 512, 768)),
    (nn.SiLU, (8, 512, 768)), (nn.Mish, (8, 512, 768)), (nn.ELU, (8, 512, 768)), (nn.Hardswish, (8, 512, 768)),
    (nn.Hardsigmoid, (8, 512, 768)), (nn.LeakyReLU, (8, 512, 768)), (nn.Hardtanh, (8, 512, 768)),
    (nn.Softplus, (8, 512, 768)), (nn.GLU, (8, 512, 768)), (nn.PReLU, (8, 512, 768)), (nn.LogSigmoid, (8, 512, 768)),
    (nn.Softshrink, (8, 512, 768)), (nn.Hardshrink, (8, 512, 768)), (lambda: nn.Softmax(-1), (8, 16, 200, 200)),
    (lambda: nn.LogSoftmax(-1), (4, 200, 3000)), (lambda: nn.Dropout(0.1), (8, 512, 768)),
    (lambda: nn.AvgPool2d(2), (4, 64, 48, 48)), (lambda: nn.MaxPool2d(2), (4, 64, 48, 48)),
    (lambda: nn.AdaptiveAvgPool2d(7), (4, 64, 48, 48)), (lambda: nn.AdaptiveAvgPool1d(7), (4, 64, 48)),
    (lambda: nn.AvgPool1d(2), (4, 64, 480)), (lambda: nn.Upsample(scale_factor=2, mode="nearest"), (4, 64, 24, 24)),
    (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 64, 24, 24)),
    (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), (4, 64, 24, 24)),
    (lambda: nn.Unfold(14, stride=14), (2, 3, 224, 224)), (lambda: nn.PixelShuffle(2), (2, 64, 24, 24)),
    (lambda: nn.ReflectionPad1d(20), (2, 64, 400)), (lambda: nn.ReplicationPad2d(2), (2, 64, 24, 24)),
)  # fmt: skip


def _backward(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> Program:
    def run() -> None:
        made = layer().to(**_BF16)
        made(torch.zeros(shape, requires_grad=True, **_BF16) * 1).float().mean().backward()

    return run


# -- losses ------------------------------------------------------------------------------------------------------------

_LOSSES: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss, functional.kl_div,
    lambda a, b: functional.kl_div(a, b, log_target=True, reduction="batchmean"),
    lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    functional.binary_cross_entropy_with_logits, functional.poisson_nll_loss,
    lambda a, b: functional.cosine_similarity(a, b).mean(), lambda a, b: torch.dist(a, b),
    lambda a, b: functional.cross_entropy(a, b.argmax(-1), label_smoothing=0.1),
    lambda a, b: functional.cross_entropy(a, b.argmax(-1), reduction="none").sum(),
    lambda a, b: functional.cross_entropy(a, b.softmax(-1)),
    lambda a, b: functional.nll_loss(a[None].transpose(1, 2), b.argmax(-1)[None]),
    lambda a, b: torch.logaddexp(a, b).mean(), lambda a, b: torch.maximum(a, b).mean(),
    lambda a, b: torch.minimum(a, b).sum(), lambda a, b: torch.lerp(a, b, 0.5).sum(),
    lambda a, b: torch.atan2(a, b).sum(), lambda a, b: torch.xlogy(a, b).sum(), lambda a, b: torch.fmod(a, b).sum(),
    lambda a, b: torch.addcmul(a, a, b).sum(), lambda a, b: torch.addcdiv(a, a, b).sum(),
    lambda a, b: torch.cdist(a, b).sum(),
    lambda a, b: torch.baddbmm(a[None] @ b.t()[None], a[None], b.t()[None]).sum(),
    lambda a, b: (a[:, None] @ b[:, :, None]).sum(), lambda a, b: torch.outer(a[0], b[0]).sum(),
    lambda a, b: torch.mv(a, b[0]).sum(), lambda a, b: torch.dot(a[0], b[0]), lambda a, b: torch.hypot(a, b).sum(),
    lambda a, b: torch.copysign(a, b).sum(), lambda a, b: (a**b).sum(), lambda a, b: torch.remainder(a, 2.5).sum(),
)  # fmt: skip


def _of_two(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Program:
    def run() -> None:
        a, b = (torch.zeros(700, 320, requires_grad=True, **_CARD) for _ in range(2))
        loss(a * 1, b * 1).backward()

    return run


# -- functions ---------------------------------------------------------------------------------------------------------

_FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.var(-1), lambda x: x.std(0), lambda x: torch.var_mean(x, -1)[0], lambda x: x.logsumexp(-1),
    lambda x: x.amax(-1), lambda x: x.amin(0), lambda x: x.max(-1)[0], lambda x: x.min(0)[0],
    lambda x: x.norm(dim=-1), lambda x: x.norm(p=1), lambda x: x.cumsum(-1), lambda x: x.cumsum(0),
    lambda x: x.cumprod(-1), lambda x: x.logcumsumexp(-1), lambda x: x.sort(-1)[0],
    lambda x: x.sort(dim=-1, stable=True)[0], lambda x: x.sort(0)[0], lambda x: x.flatten().sort()[0],
    lambda x: x.topk(20, -1)[0], lambda x: x.flatten().topk(50)[0], lambda x: x.kthvalue(3, -1)[0],
    lambda x: x.prod(-1), lambda x: x.nansum(-1), lambda x: x.aminmax(dim=-1)[0], lambda x: x.expm1(),
    lambda x: x.erf(), lambda x: x.sinh(), lambda x: x.acos(), lambda x: x.atan(), lambda x: x.tan(),
    lambda x: x.sign() * x, lambda x: x.round() * x, lambda x: x.ceil() * x, lambda x: x.trunc() * x,
    lambda x: x.frac(), lambda x: x.log2(), lambda x: x.log10(), lambda x: x.exp2(), lambda x: x.square(),
    lambda x: x.logit(), lambda x: x.clamp_min(0.0), lambda x: x.clamp_max(1.0), lambda x: x.clamp(x.detach(), None),
    lambda x: x.tril(), lambda x: x.triu(), lambda x: x.roll(3, 1), lambda x: x.flip(-1), lambda x: x.diagonal(),
    lambda x: x.repeat(2, 1), lambda x: x.repeat_interleave(2, 0), lambda x: x.unfold(1, 20, 10),
    lambda x: x.unbind(1)[0], lambda x: x.chunk(2)[1], lambda x: x.rot90(), lambda x: x.diff(), lambda x: x.trace(),
    lambda x: x.nan_to_num(), lambda x: x.renorm(2, 0, 1.0), lambda x: x.T.contiguous(),
    lambda x: x.as_strided((100, 100), (320, 1)), lambda x: x.addmm(x, x[:320, :320]),
    lambda x: functional.normalize(x), lambda x: functional.pad(x, (3, 4)),
    lambda x: x.index_add(0, _rows(90), x[:90]), lambda x: x.index_copy(0, _rows(90), x[:90]),
    lambda x: x.index_fill(0, _rows(90), 0.0), lambda x: x.index_select(0, _rows(90)), lambda x: x.take(_rows(90)),
    lambda x: x.scatter_reduce(0, _rows(90)[:, None].expand(90, 320), x[:90], "amax"),
    lambda x: x.scatter_add(0, _rows(90)[:, None].expand(90, 320), x[:90]),
    lambda x: x.gather(1, x.argmin(-1, keepdim=True)), lambda x: x.where(x > 0, 0.0), lambda x: x.half().float(),
    lambda x: functional.embedding_bag(_rows(90)[None].expand(4, 90), x),
    lambda x: functional.embedding(_rows(6000), x), lambda x: x.view(2, 350, 320).transpose(1, 2).softmax(-1),
    lambda x: x.masked_fill(x > 0, 0.0), lambda x: x.bfloat16().sum(0), lambda x: x.bfloat16().mean(0),
    lambda x: x.expand(9, 700, 320).sum((0, 1)),
)  # fmt: skip


def _of_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    def run() -> None:
        function(torch.zeros(700, 320, requires_grad=True, **_CARD) * 1).sum().backward()

    return run


def _rows(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.long, device="cuda")


# -- attention, experts, masks, numbers --------------------------------------------------------------------------------

_ATTENTION: tuple[dict[str, Any], ...] = (
    {"backend": nn.attention.SDPBackend.FLASH_ATTENTION}, {"backend": nn.attention.SDPBackend.EFFICIENT_ATTENTION},
    {"backend": nn.attention.SDPBackend.MATH}, {"backend": nn.attention.SDPBackend.FLASH_ATTENTION, "keys": 2},
    {"backend": nn.attention.SDPBackend.EFFICIENT_ATTENTION, "mask": True},
)  # fmt: skip


def _attention(*, backend: Any, keys: int = 14, mask: bool = False) -> Program:
    def run() -> None:
        q = torch.zeros(2, 300, 14, 64, requires_grad=True, **_BF16).transpose(1, 2)
        k, v = (torch.zeros(2, 300, keys, 64, requires_grad=True, **_BF16).transpose(1, 2) for _ in range(2))
        bias = torch.zeros(2, 14, 300, 304, **_BF16)[..., :300] if mask else None
        with nn.attention.sdpa_kernel(backend):
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=not mask, enable_gqa=keys != 14
            ).sum().backward()

    return run


def _experts() -> None:
    """A mixture of experts' routing, its grouped products and their gradients."""
    hidden = torch.zeros(4096, 512, requires_grad=True, **_BF16)
    weights = torch.zeros(16, 512, 256, requires_grad=True, **_BF16)
    scores, chosen = torch.zeros(4096, 16, **_CARD).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort()
    torch.bincount(chosen.flatten(), minlength=16)
    starts = torch.histc(chosen.flatten().float(), bins=16, min=0, max=15).cumsum(0).int()
    rows = torch._grouped_mm(hidden[order // 2], weights, starts)
    torch.zeros(4096, 256, **_BF16).index_add(
        0, order // 2, rows * scores.flatten()[order, None].bfloat16()
    ).sum().backward()


def _index_backward() -> None:
    x = torch.zeros(3000, 64, requires_grad=True, **_CARD)
    (x[_rows(5000)].sum() + x[_rows(40), _rows(40)].sum() + x[:, _rows(20)].sum()).backward()


def _masks() -> None:
    x, mask = torch.zeros(6, 900, **_CARD), torch.zeros(6, 900, dtype=torch.bool, device="cuda")
    mask.nonzero()
    x.masked_select(mask)
    x.requires_grad_(True)
    x[mask].sum().backward()
    x.detach().masked_scatter_(mask, torch.zeros(5400, **_CARD))
    for function in (torch.cumsum, torch.sum, torch.all, torch.any):
        function(mask, -1)
    mask.flatten().cumsum(0), mask.any(), mask.int().argmax(-1)
    mask.logical_or(mask), mask.logical_xor(mask), mask.logical_and(mask), mask.logical_not()
    torch.isin(mask.long(), torch.tensor([1, 2], device="cuda"))


def _random_numbers() -> None:
    x = torch.zeros(900, 300, **_CARD)
    x.bernoulli_(0.5), x.geometric_(0.5), x.exponential_(), x.log_normal_(), x.cauchy_(), x.random_()
    torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9), torch.bernoulli(x)
    torch.randn(900, 300, **_CARD), torch.rand(900, 300, **_CARD), torch.randint(9, (900, 300), **_CARD)
    torch.normal(x, 1.0)
    functional.gumbel_softmax(x)
    torch.randperm(5000, device="cuda")


def _rollout() -> None:
    """Sampling: the largest scores, their sum in order, and draws."""
    scores = torch.zeros(8, 32000, **_CARD)
    scores.topk(50, -1)
    ordered, _ = scores.sort(-1, descending=True)
    ordered.softmax(-1).cumsum(-1)
    scores.softmax(-1).multinomial(1)
    scores.softmax(-1).multinomial(4)
    scores.argmax(-1)
    torch.arange(0, 900, device="cuda"), torch.linspace(0, 1, 900, device="cuda"), torch.eye(300, device="cuda")
    torch.full((900,), 2, device="cuda"), torch.tril_indices(60, 60, device="cuda")


def _audio() -> None:
    """Spectrograms of speech."""
    waves = torch.zeros(2, 16000, **_CARD)
    torch.view_as_real(
        torch.stft(waves, 400, 160, window=torch.hann_window(400, device="cuda"), return_complex=True)
    ).abs()


def _packed() -> None:
    """Flash attention of sequences one after the other."""
    q, k, v = (torch.zeros(900, heads, 64, requires_grad=True, **_BF16) for heads in (14, 2, 2))
    starts = torch.tensor([0, 400, 900], dtype=torch.int32, device="cuda")
    out = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, 500, 500, 0.0, True, False)
    out[0].sum().backward()


def _scaled_down() -> None:
    """Loss scaling, and the gradients' total norm."""
    grads = [torch.zeros(shape, **_CARD) for shape in ((300, 700), (900,), (200, 1000, 3))]
    torch._foreach_abs(grads), torch._foreach_max(grads), torch._foreach_clamp_max(grads, 1.0)
    torch._foreach_norm(grads, float("inf"))
    torch._foreach_pow(grads, 2), torch._foreach_neg(grads), torch._foreach_reciprocal(grads)
    torch._foreach_copy_(grads, [grad.clone() for grad in grads])
    torch._foreach_zero_(grads)
    torch.nn.utils.get_total_norm(grads)
