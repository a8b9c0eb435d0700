"""One cache per layer, as in mlx-lm; public names are in `pykvcache.arrays`.

`base.BaseCache` is their interface; `kinds.KvCacheKind` is where each class is registered.
"""
