"""One cache per layer, as in mlx-lm; public names are in `pykvcache.arrays`.

`BaseCache` is what all have in common, `KvCacheKind` where each is registered once.
"""
