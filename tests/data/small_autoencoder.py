"""Settings of autoencoders of diffusers that take milliseconds."""

SMALL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
