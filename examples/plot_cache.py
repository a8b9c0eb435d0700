"""Draw a KV cache: the norms of the keys, and the cells that three sequences share.

A story is forked twice and continued in three ways. Above: the mean norm of each token's keys in
every layer, read in place. Below: the cells; those of the story belong to all three sequences.
Usage: python examples/plot_cache.py [model.gguf] [picture.png]      (needs the extra plot)
"""

import sys

import numpy as np

from pykvcache import LlamaContext, LlamaModel, Sampler, embedded_model_path

try:
    from matplotlib import pyplot as plt
except ImportError:
    sys.exit("this example needs matplotlib: pip install '.[plot]' in the clone")

PROMPT = "Once upon a time there was a little village. Lucy has a red kite. Tom is a baker."
PER_ROW = 32
plt.switch_backend("agg")

path = next((a for a in sys.argv[1:] if a.endswith(".gguf")), embedded_model_path())
picture = next((a for a in sys.argv[1:] if not a.endswith(".gguf")), "cache.png")
with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_seq_max=3) as ctx:
    if ctx.memory_kind != "attention":
        sys.exit(f"{ctx.memory_kind} memory is not only keys and values")
    prompt = model.tokenize(PROMPT)
    ctx.decode(prompt[:-1])
    for fork in (1, 2):
        ctx.copy_kv_cache_seq(0, fork)
    for seq_id, n in enumerate((40, 20, 30)):
        list(ctx.generate(prompt[-1:], n, Sampler(temperature=0.9, seed=seq_id), seq_id))

    live = ctx.kv(0, copy=False)  # valid until the next call that changes the cache
    norms = np.stack([np.linalg.norm(x.keys, axis=-1).mean(-1) for x in live.layers])
    positions, table = live.positions, ctx.cells()

figure, (above, below) = plt.subplots(2, 1, figsize=(11, 5), layout="constrained")
image = above.pcolormesh(positions, np.arange(len(norms)), norms, shading="nearest")
figure.colorbar(image, ax=above, label="mean norm of keys")
above.set(xlabel="position in sequence 0 (shared up to the dots)", ylabel="layer", title="Keys")
above.set_yticks(range(len(norms)))
above.axvline(len(prompt) - 1.5, color="white", linestyle=":")

owners = table.members @ 2 ** np.arange(table.members.shape[1])  # 1, 2, 4: one sequence; 7: all
grid = np.full(-(-(table.cell.max() + 1) // PER_ROW) * PER_ROW, np.nan)
for value, owner in enumerate(np.unique(owners)):
    cells = table.cell[owners == owner]
    grid[cells] = value
    who = "sequence " + " + ".join(str(s) for s in range(3) if owner >> s & 1)
    below.scatter([], [], marker="s", color=f"C{value}", label=f"{who}: {len(cells)} cells")
below.pcolormesh(grid.reshape(-1, PER_ROW), cmap="tab10", vmin=0, vmax=9, ec="white", lw=2)
below.set(xlabel=f"cells, {PER_ROW} in a row", ylabel="first cell", title="Cells in use")
below.set_yticks(np.arange(len(grid) // PER_ROW) + 0.5, np.arange(0, len(grid), PER_ROW))
below.invert_yaxis()
below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, frameon=False)
figure.savefig(picture, dpi=100)
print(f"{len(table)} cells for {sum(table.members.sum(0))} tokens, drawn in {picture}")
