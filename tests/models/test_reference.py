"""The networks against the papers' sizes, diffusers and torch."""

import math

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from torch import nn
from torch.nn import functional as F

from noisewise.models import MODELS, DiT, UNet, UViT, build_model
from noisewise.models.transformer import Attention, positions_2d, sinusoid, unpatch
from tests.models.small_models import CLASSES, batch, small, stirred

THEIR_CIFAR10 = {
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "dropout": 0.1,
    "norm_num_groups": 32,
}
THEIR_CELEBAHQ = {
    "sample_size": 64,
    "block_out_channels": (224, 448, 672, 896),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 32,
}


def parameters_of(maker, *args, **options):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in maker(*args, **options).parameters())


# The papers' sizes


def test_unet_has_the_size_of_ddpm_on_cifar10():
    assert parameters_of(UNet, (3, 32, 32)) == 35_746_307
    assert parameters_of(UNet2DModel, **THEIR_CIFAR10) == 35_746_307
    assert parameters_of(UNet, (3, 32, 32), channels=64) == 8_952_067


def test_unet_is_the_architecture_of_latent_diffusion_on_celebahq():
    options = {"channels": 224, "multipliers": (1, 2, 3, 4), "attention": (32, 16, 8), "dropout": 0.0, "head_channels": 32}
    with torch.device("meta"):
        ours, theirs = UNet((3, 64, 64), **options), UNet2DModel(**THEIR_CELEBAHQ)
    shapes = {name: tuple(weight.shape) for name, weight in theirs.state_dict().items()}
    assert {name: tuple(weight.shape) for name, weight in ours.net.state_dict().items()} == shapes
    assert sum(map(math.prod, shapes.values())) == pytest.approx(274e6, rel=1e-3)
    assert (ours.net.config.down_block_types, ours.net.config.up_block_types) == (
        THEIR_CELEBAHQ["down_block_types"],
        THEIR_CELEBAHQ["up_block_types"],
    )
    heads = [[a.heads for a in block.attentions] for block in theirs.down_blocks[1:]]
    assert (
        [[a.heads for a in block.attentions] for block in ours.net.down_blocks[1:]] == heads == [[14] * 2, [21] * 2, [28] * 2]
    )


@pytest.mark.parametrize(
    ("width", "depth", "heads", "millions"), [(384, 12, 6, 33), (768, 12, 12, 130), (1024, 24, 16, 458), (1152, 28, 16, 675)]
)
def test_dit_has_the_papers_sizes(width, depth, heads, millions):
    count = parameters_of(DiT, (4, 32, 32), 1000, 2, width, depth, heads, out_channels=8)
    assert round(count / 1e6) == millions


def test_dit_xl_counts_the_published_parameters_less_the_fixed_positions():
    trainable = parameters_of(DiT, (4, 32, 32), 1000, 2, 1152, 28, 16, out_channels=8)
    assert trainable + 256 * 1152 == 675_129_632  # the published code holds the positions as a frozen parameter


@pytest.mark.parametrize(
    ("shape", "classes", "width", "depth", "heads", "millions"),
    [
        ((3, 32, 32), 0, 512, 13, 8, 44),  # S/2 is CIFAR-10's, unconditional
        ((4, 32, 32), 1000, 768, 17, 12, 131),
        ((4, 32, 32), 1000, 1024, 21, 16, 287),
        ((4, 32, 32), 1000, 1152, 29, 16, 501),
    ],
)
def test_uvit_has_the_papers_sizes(shape, classes, width, depth, heads, millions):
    assert round(parameters_of(UViT, shape, classes, 2, width, depth, heads) / 1e6) == millions


@pytest.mark.parametrize("name", MODELS)
def test_label_table_has_a_row_for_no_class(name):
    difference = sum(p.numel() for p in small(name, CLASSES).parameters()) - sum(p.numel() for p in small(name).parameters())
    width = 4 * 16 if name == "unet" else 32
    tokens = width if name == "uvit" else 0  # U-ViT's class token has a position as well
    assert difference == (CLASSES + 1) * width + tokens


# Equality with references


@pytest.mark.parametrize("width", [2, 6, 7, 256])
def test_sinusoid_equals_diffusers(width):
    time = torch.tensor([0.0, 0.25, 1.0, 17.0, 499.5, 999.0])
    theirs = get_timestep_embedding(time, width, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(sinusoid(time, width), theirs, rtol=1e-5, atol=1e-4)


def test_positions_equal_diffusers():
    theirs = get_2d_sincos_pos_embed(24, 5, base_size=5, output_type="pt")
    torch.testing.assert_close(positions_2d(5, 5, 24), theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_equals_torch(bias):
    torch.manual_seed(0)
    ours, theirs = stirred(Attention(24, 3, bias=bias)), nn.MultiheadAttention(24, 3, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias if bias else torch.zeros(72))
        theirs.out_proj.load_state_dict(ours.project.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_unpatch_inverts_cutting_into_patches():
    image = torch.randn(2, 3, 6, 4)
    cut = F.unfold(image, 2, stride=2).transpose(1, 2)  # channels slowest
    tokens = cut.unflatten(2, (3, 4)).transpose(2, 3).flatten(2)
    assert torch.equal(unpatch(tokens, (3, 2), 2), image)


@pytest.mark.parametrize("classes", [0, CLASSES])
def test_unet_equals_diffusers_with_the_same_weights(classes):
    ours = stirred(build_model("unet", {"channels": 32}, shape=(3, 32, 32), classes=classes), std=0.02)
    theirs = UNet2DModel(
        **THEIR_CIFAR10 | {"block_out_channels": (32, 64, 64, 64), "attention_head_dim": None},
        num_class_embeds=CLASSES + 1 if classes else None,
    ).eval()
    theirs.load_state_dict(ours.net.state_dict())
    x, time = batch(2, (3, 32, 32))
    labels = torch.tensor([0, CLASSES]) if classes else None
    assert torch.equal(ours(x, time, labels), theirs(x, time, labels).sample)
    assert ours(x, time, labels).std() > 0.01


def copy_dit(ours, theirs):
    """Our DiT's weights into diffusers', where each block has an embedding of its own."""
    pairs = [(theirs.pos_embed.proj, ours.patches.project)]
    pairs += [(theirs.proj_out_1, ours.last.modulation), (theirs.proj_out_2, ours.last.project)]
    for block, mine in zip(theirs.transformer_blocks, ours.blocks, strict=True):
        embedding = block.norm1.emb
        embedding.time_proj.downscale_freq_shift = 0  # the paper's; diffusers has 1
        pairs += [(embedding.timestep_embedder.linear_1, ours.time.expand)]
        pairs += [(embedding.timestep_embedder.linear_2, ours.time.project)]
        pairs += [(embedding.class_embedder.embedding_table, ours.label), (block.norm1.linear, mine.modulation)]
        pairs += [(block.attn1.to_out[0], mine.attention.project)]
        pairs += [(block.ff.net[0].proj, mine.mlp.expand), (block.ff.net[2], mine.mlp.project)]
        projections = (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v)
        weights, biases = mine.attention.qkv.weight.chunk(3), mine.attention.qkv.bias.chunk(3)
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            projection.load_state_dict({"weight": weight, "bias": bias})
    for target, source in pairs:
        target.load_state_dict(source.state_dict())


def test_dit_equals_diffusers_with_the_same_weights():
    ours = stirred(DiT((3, 8, 8), CLASSES, width=32, depth=3, heads=4, out_channels=6))
    theirs = DiTTransformer2DModel(4, 8, 3, 6, 3, sample_size=8, num_embeds_ada_norm=CLASSES, norm_eps=1e-6).eval()
    copy_dit(ours, theirs)
    x, time = batch(4, (3, 8, 8))
    labels = torch.tensor([0, 3, 9, CLASSES])
    expected = theirs(x, time, class_labels=labels).sample
    assert expected.shape == (4, 6, 8, 8)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(x, time, labels), expected, rtol=1e-4, atol=1e-5)


def test_uvit_equals_its_definition_written_out():
    model = stirred(UViT((2, 4, 4), CLASSES, width=8, depth=5, heads=2))
    w = model.state_dict()

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (8,), w[f"{name}.weight"], w[f"{name}.bias"])

    def block(x, name, skip=None):
        if skip is not None:
            x = linear(torch.cat([x, skip], -1), f"{name}.join")
        q, k, v = linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv").chunk(3, -1)
        heads = [torch.softmax(q[..., h] @ k[..., h].transpose(1, 2) / 2, -1) @ v[..., h] for h in (slice(0, 4), slice(4, 8))]
        x = x + linear(torch.cat(heads, -1), f"{name}.attention.project")
        return x + linear(F.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.expand")), f"{name}.mlp.project")

    x, time = batch(3, (2, 4, 4))
    labels = torch.tensor([0, 7, CLASSES])
    patches = F.unfold(x, 2, stride=2).transpose(1, 2) @ w["patches.project.weight"].flatten(1).T + w["patches.project.bias"]
    waves = get_timestep_embedding(time, 8, flip_sin_to_cos=True, downscale_freq_shift=0)
    tokens = torch.cat([w["label.weight"][labels][:, None], waves[:, None], patches], 1) + w["position"]
    one = block(tokens, "first_half.0")
    two = block(one, "first_half.1")
    up = block(block(two, "middle"), "second_half.0", two)
    up = block(up, "second_half.1", one)
    pixels = linear(norm(up, "norm"), "project")[:, 2:]
    image = torch.empty(3, 2, 4, 4)
    for patch in range(4):
        row, column = 2 * (patch // 2), 2 * (patch % 2)
        image[:, :, row : row + 2, column : column + 2] = pixels[:, patch].reshape(3, 2, 2, 2).permute(0, 3, 1, 2)
    expected = F.conv2d(image, w["final.weight"], w["final.bias"], padding=1)
    torch.testing.assert_close(model(x, time, labels), expected, rtol=1e-4, atol=1e-5)
