"""The shapes of the `gpt` presets, for the peers; the bytes' 257 ids are padded to VOCAB."""

PRESETS = {
    "tiny": dict(layers=4, hidden=128, heads=4, ffn=384),
    "small": dict(layers=6, hidden=256, heads=4, ffn=768),
    "medium": dict(layers=6, hidden=384, heads=6, ffn=1024),
    "large": dict(layers=8, hidden=512, heads=8, ffn=1536),
    "huge": dict(layers=12, hidden=768, heads=12, ffn=2048),
}
VOCAB = 320
